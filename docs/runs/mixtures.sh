#!/bin/sh
# Measures mixtures of experts with random weights on one GPU: the figures of docs/gpu.md, "Mixtures of experts".
#
#   sh docs/runs/mixtures.sh OUT [CASE …]      CASE: qwen3-bf16 qwen3-fp8 qwen3-uint4 gpt-oss-mxfp4 (default: all)
#
# OUT gets CASE-latency.json (decode of one request, time to first token, batches, load_s) and, with the variable TRACE,
# CASE-serve.json: 600 requests with the lengths of that file (Azure's CSV), all sent at once. ALLSPAN names the command,
# FLAGS stands for its flags `--device cuda`, BATCHES for the batches, PROMPTS for 600. Prompts come from no cache.
# Whether results are right, tests on a GPU say:
#
#   pytest -m gpu tests/worker/backend/cuda/test_mixtures.py tests/worker/backend/cuda/test_family_formats.py \
#     tests/kernels/cuda/test_experts.py tests/kernels/cuda/test_grouped_sm90.py tests/kernels/cuda/test_norm_route.py
set -eu

# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/random_weights.sh"
shift
[ $# -gt 0 ] || set -- qwen3-bf16 qwen3-fp8 qwen3-uint4 gpt-oss-mxfp4

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

for case in "$@"; do
  format=${case##*-}
  case $case in
    qwen3-*) model qwen3 qwen3 ;;
    gpt-oss-*) model gpt-oss gpt_oss ;;
    *) echo "mixtures.sh: there is no case $case" >&2 && exit 2 ;;
  esac
  [ "$format" != bf16 ] || format=none
  bench latency "$case" --quantization "$format" --batches "$batches"
  trace "$case" --quantization "$format"
done
