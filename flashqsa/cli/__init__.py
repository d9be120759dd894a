"""The work of each command; `flashqsa/__main__.py` parses its arguments."""
