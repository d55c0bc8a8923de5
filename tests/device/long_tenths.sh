#!/bin/bash
# The long tests in ten parts at once, for a machine with many cores. Usage: long_tenths.sh OUT
export OMP_NUM_THREADS=1 TORCH_DISTRIBUTED_DEBUG=DETAIL PYTHONPATH=. CUDA_VISIBLE_DEVICES=""
for part in 0 1 2 3 4 5 6 7 8 9; do
  TENTH=$part timeout 560 python3 -m pytest -q -m long -p no:cacheprovider --durations=20 >"$1/tenth$part.log" 2>&1 &
done
wait
tail -qn 12 "$1"/tenth*.log | grep -E "passed|failed|^FAILED|^ERROR"
