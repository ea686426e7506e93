#!/bin/sh
# Measures mixtures of experts with random weights on one GPU: the figures of docs/gpu.md, "Mixtures of experts".
#
#   sh docs/runs/mixtures.sh OUT [CASE …]      CASE: qwen3-bf16 qwen3-fp8 qwen3-uint4 gpt-oss-mxfp4 (default: all)
#
# OUT gets CASE-latency.json (decode of one request, time to first token, batches, load_s) and, with the variable TRACE,
# CASE-serve.json: 600 requests with the lengths of that file (Azure's CSV), all sent at once. ALLSPAN names the command,
# FLAGS stands for its flags `--device cuda`. Prompts come from no cache. Whether results are right, tests on a GPU say:
#
#   pytest -m gpu tests/worker/backend/cuda/test_mixtures.py tests/worker/backend/cuda/test_family_formats.py \
#     tests/kernels/cuda/test_experts.py tests/kernels/cuda/test_grouped_sm90.py tests/kernels/cuda/test_norm_route.py
set -eu

out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- qwen3-bf16 qwen3-fp8 qwen3-uint4 gpt-oss-mxfp4
batches=${BATCHES:-1x1024x257,1x8192x1,8x1024x256,64x1024x256,256x1024x256}

# The tokenizer knows bytes alone: prompts are token ids.
tokenizer() {
  "${PYTHON:-python3}" - "$1" << 'END'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.save(sys.argv[1])
END
}

qwen3() {
  cat << 'END'
{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
 "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "num_experts": 128,
 "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true, "decoder_sparse_step": 1,
 "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
 "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END
}

gpt_oss() {
  cat << 'END'
{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 36,
 "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
 "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072,
 "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "attention_bias": true, "hidden_act": "silu",
 "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
 "truncate": false, "original_max_position_embeddings": 4096}, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END
}

# bench NAME FILE FLAG …
bench() {
  name=$1 file=$2
  shift 2
  # shellcheck disable=SC2086  # FLAGS are several words
  "${ALLSPAN:-allspan}" bench "$name" "$model" --load-format dummy --quantization "$format" --max-model-len 16384 \
    --max-num-seqs 256 --max-num-batched-tokens 8192 --no-enable-prefix-caching --quiet --json "$@" \
    ${FLAGS:---device cuda} > "$file"
  tail -n 1 "$file"
}

for case in "$@"; do
  format=${case##*-} model=$out/${case%-*}
  mkdir -p "$model"
  tokenizer "$model/tokenizer.json"
  case $case in
    qwen3-*) qwen3 > "$model/config.json" ;;
    gpt-oss-*) gpt_oss > "$model/config.json" ;;
    *) echo "mixtures.sh: there is no case $case" >&2 && exit 2 ;;
  esac
  [ "$format" != bf16 ] || format=none
  bench latency "$out/$case-latency.json" --batches "$batches"
  [ -z "${TRACE:-}" ] || bench serve "$out/$case-serve.json" --backend grpc --dataset-name trace \
    --dataset-path "$TRACE" --num-prompts 600 --trace-speedup inf
done
