#!/bin/bash
# The slow tests in eight parts at once, for a machine with many cores. Usage: slow_shards.sh OUT
export OMP_NUM_THREADS=1 TORCH_DISTRIBUTED_DEBUG=DETAIL PYTHONPATH=. CUDA_VISIBLE_DEVICES=""
mapfile -t files < <(python3 -m pytest --collect-only -q -m "slow and not long" 2>/dev/null | sed -n 's/::.*//p' | sort | uniq -c | sort -rn | awk '{print $2}')
for part in 0 1 2 3 4 5 6 7; do
  mine=(); for i in "${!files[@]}"; do [ $((i % 8)) -eq $part ] && mine+=("${files[$i]}"); done
  timeout 500 python3 -m pytest -q -m "slow and not long" -p no:cacheprovider --durations=60 "${mine[@]}" >"$1/part$part.log" 2>&1 &
done
wait
tail -n 3 "$1"/part*.log
