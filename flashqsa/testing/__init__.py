"""Cases, inputs, comparisons and their verdict, shared by the tests, `flashqsa verify`, the benchmarks and captures."""
