#!/usr/bin/env bash
# compute-sanitizer over a few GPU tests of Volta's and Turing's kernels, compiled as PTX for the GPU that is here.
# Run from the top of the checkout, on a machine with an NVIDIA GPU and pytest. Takes PYTHON, OUT (a folder for the logs).
# sm_70 needs an NVRTC 12: pip install nvidia-cuda-nvrtc-cu12==12.6.77, or FLASHQSA_NVRTC.
set -uo pipefail
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/sanitizer}
mkdir -p "$OUT"
SANITIZER=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
if [ -z "$SANITIZER" ]; then
    "$PYTHON" -m pip install --quiet --target "$OUT/pip" nvidia-cuda-sanitizer-api
    SANITIZER=$(find "$OUT/pip" -name compute-sanitizer -type f | head -1)
    chmod +x "$SANITIZER"
fi
"$SANITIZER" --version | head -2
export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # a tensor of its own allocation: reads past its end are seen
export CUDA_LAUNCH_BLOCKING=1
failed=0
run() {
    local name=$1; shift
    # Kernels are compiled before, so that the sanitizer watches launches and not the compiler.
    timeout 540 "$SANITIZER" --tool memcheck --target-processes all --error-exitcode 99 --print-limit 20 \
        --log-file "$OUT/$name.sanitizer.txt" \
        "$PYTHON" -m pytest -q -x -p no:cacheprovider -m gpu "$@" >"$OUT/$name.pytest.txt" 2>&1
    local rc=$?
    echo "$name: rc=$rc; $(tail -1 "$OUT/$name.pytest.txt"); $(grep -h 'ERROR SUMMARY' "$OUT/$name.sanitizer.txt" | sort | uniq -c | tr '\n' ';')"
    # A run that executed nothing has shown nothing.
    grep -q ' passed' "$OUT/$name.pytest.txt" || { echo "$name: no test passed"; failed=1; }
    [ $rc -eq 0 ] || failed=1
}
CASES='near or verify-model or hole-under-the-tail or padding-first-middle-last or decode-16 or prefill-fp8-head-scales or pages-of-784'
run attend tests/test_sm7x_attend.py -k "(test_every_case_on_a_gpu and ($CASES)) or test_every_split_on_a_gpu and verify-model"
SCORES='prefill-odd-k or prefill-normal-scores-fp8 or decode-33 or holes-below or verify-1-to-12 or pages-of-784'
run score tests/test_sm7x_score.py -k "test_every_case_under_every_window and ptx and ($SCORES)"
exit $failed
