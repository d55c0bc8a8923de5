#!/bin/bash
# Tests in ten parts at once, for a machine with many cores: the long ones, or those of another mark.
# Usage: tenths.sh OUT [MARK]
export OMP_NUM_THREADS=1 TORCH_DISTRIBUTED_DEBUG=DETAIL PYTHONPATH=. CUDA_VISIBLE_DEVICES=""
for part in 0 1 2 3 4 5 6 7 8 9; do
  TENTH=$part timeout 560 python3 -m pytest -q -m "${2:-long}" -p no:cacheprovider --durations=20 >"$1/tenth$part.log" 2>&1 &
done
wait
cat "$1"/tenth*.log | grep -E "passed|failed|^FAILED|^ERROR"
