#!/bin/sh
# Measures speculative decoding with random weights on one GPU: what steps with drafts take beside those without, and
# tokens a second of both in one run, with drafts of which a chosen share is right.
#
#   sh docs/runs/speculation.sh OUT [CASE …]   CASE: qwen2.5-bf16 qwen2.5-fp8 qwen2.5-int8 qwen2.5-uint4 (default: the
#                                              first), tiny-bf16 (a trial of the script, on a CPU with FLAGS='--device cpu')
#
# OUT gets, for each of BATCHES (1 and 16 requests of 1,024 tokens and 256 new ones) and of RATES (0.6, 0.8, 0.9),
# CASE-bBATCH-rRATE-speculation.json, with up to DRAFTS (5) drafts of a request in a step; of each batch a rate of 1, too,
# at which a step has as many drafts as it can. `ratio` is that of tokens a second, and with_drafts_step_s beside
# without_step_s (the medians) says what verifying takes, the wait for the host included. CASE-step.json has steps of 1
# to 128 requests without drafts: what rows take. Every answer is one token again and again, as near ties of random
# weights would put an end to what was recorded. ALLSPAN names the command, FLAGS stands for its flags `--device cuda`.
# Whether results are right, tests on a GPU say:
#
#   cd tests/worker/backend/cuda && pytest -m gpu test_drafts.py test_draft_models.py test_draft_heads.py test_device_sampling.py
set -eu

# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/random_weights.sh"
shift
[ $# -gt 0 ] || set -- qwen2.5-bf16

"${PYTHON:-python3}" - "$out/text.txt" << 'END'
import pathlib
import random
import sys

draw = random.Random(0)
pathlib.Path(sys.argv[1]).write_text("".join(draw.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(1 << 16)))
END

for case in "$@"; do
  format=${case##*-}
  case $case in
    qwen2.5-*) model qwen2.5 qwen ;;
    tiny-*) model tiny tiny ;;
    *) echo "speculation.sh: there is no case $case" >&2 && exit 2 ;;
  esac
  [ "$format" != bf16 ] || format=none
  bench step "$case" --quantization "$format" --batch-sizes "${ROWS:-1,2,4,8,16,32,64,96,128}" \
    --input-len "${PROMPT:-1024}" --output-len "${NEW:-256}"
  for batch in ${BATCHES:-1 16}; do
    for rate in ${RATES:-0.6 0.8 0.9} 1; do
      bench speculation "$case-b$batch-r$rate" --quantization "$format" --text "$out/text.txt" --one-token \
        --prompt-len "${PROMPT:-1024}" --output-len "${NEW:-256}" --num-prompts "$((batch > 4 ? batch : 4))" \
        --batch-size "$batch" --rounds "${ROUNDS:-5}" --replay-rate "$rate" --num-drafts "${DRAFTS:-5}"
    done
  done
done
