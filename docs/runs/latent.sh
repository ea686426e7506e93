#!/bin/sh
# Measures latent attention with random weights, on one GPU and on two: DeepSeek-V2-Lite's shape, and DeepSeek-V3's.
#
#   sh docs/runs/latent.sh OUT [CASE …]        CASE (default: all but those with -eager):
#
#   lite               V2-Lite's shape in bfloat16 on one GPU
#   lite-tp            on two GPUs, which share out heads, 256 requests
#   lite-dp            on two GPUs, each of which attends for requests of its own, 256 requests
#   v3-4-tp  v3-4-dp   four layers of V3's shape in fp8 blocks of 128 on two GPUs; one of them is dense
#   v3-2-tp  v3-2-dp   two of these layers, of which one is dense: half of what four take longer is a layer with experts
#   CASE-eager         any of these without CUDA graphs
#
# OUT gets CASE-latency.json and, of lite, lite-tp and lite-dp with the variable TRACE, CASE-serve.json. The variables
# are those of docs/runs/mixtures.sh; beside them PAIR has the batches of lite-tp and lite-dp, and LAYERS those of v3-….
# Last, it prints for each batch what a layer with experts takes, of all results in OUT. Whether results are right, tests on a GPU say:
#
#   pytest -m gpu tests/cluster/test_gpu_attention_ranks.py tests/worker/backend/cuda/test_mixtures.py \
#     tests/kernels/cuda/test_latent.py
set -eu

# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/random_weights.sh"
shift
[ $# -gt 0 ] || set -- lite lite-tp lite-dp v3-4-tp v3-2-tp v3-4-dp v3-2-dp

lite() {
  cat << 'END'
{"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
 "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
 "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944,
 "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
 "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
 "norm_topk_prob": false, "routed_scaling_factor": 1.0, "vocab_size": 102400, "max_position_embeddings": 163840,
 "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32,
 "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
 "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END
}

v3() {
  cat << END
{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
 "num_hidden_layers": $layers, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
 "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
 "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
 "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
 "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 129280,
 "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": {"type": "yarn",
 "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
 "original_max_position_embeddings": 4096}, "hidden_act": "silu", "tie_word_embeddings": false,
 "torch_dtype": "bfloat16"}
END
}

# layer: from cases of four layers and of two, how long a layer with experts takes, by batch.
layer() {
  "${PYTHON:-python3}" - "$out" << 'END'
import json
import pathlib
import sys

for four in sorted(pathlib.Path(sys.argv[1]).glob("v3-4-*-latency.json")):
    two = four.with_name(four.name.replace("v3-4", "v3-2"))
    if not two.exists():
        continue
    both = [json.loads(each.read_text().splitlines()[-1])["batches"] for each in (four, two)]
    for one, other in zip(*both):
        name = "{} {batch_size}x{input_len}x{output_len}".format(four.name.removesuffix("-latency.json"), **one)
        print(f"{name}: first tokens of all {500 * (one['ttft_s'] - other['ttft_s']):.3f} ms a layer", end="")
        if one["output_len"] > 1:
            steps = [1000 * each["batch_size"] / each["decode_tokens_per_s"] for each in (one, other)]
            print(f", a step of decodes {(steps[0] - steps[1]) / 2:.3f} ms (with 4 layers {steps[0]:.3f})", end="")
        print()
END
}

for case in "$@"; do
  plain=${case%-eager} some=${LAYERS:-1x1024x129,64x1024x257,256x1024x257,1x8192x1}
  graphs=--no-enforce-eager format="--quantization fp8 --quantization-group 128"
  [ "$plain" = "$case" ] || graphs=--enforce-eager
  case $plain in
    *-dp) ranks="--ranks 2 --enable-expert-parallel --data-parallel-attention" ;;
    *-tp) ranks="--ranks 2 --enable-expert-parallel" ;;
    *) ranks="--ranks 1" ;;
  esac
  case $plain in
    lite) some=$batches ;;
    lite-tp | lite-dp) some=${PAIR:-256x1024x256} ;;
    v3-2-tp | v3-2-dp) layers=2 ;;
    v3-4-tp | v3-4-dp) layers=4 ;;
    *) echo "latent.sh: there is no case $case" >&2 && exit 2 ;;
  esac
  case $plain in
    lite*) format="--quantization none" && model lite lite ;;
    *) model "v3-$layers" v3 ;;
  esac
  # shellcheck disable=SC2086  # these are several words
  bench latency "$case" --batches "$some" $format $ranks $graphs
  # shellcheck disable=SC2086
  case $plain in lite*) trace "$case" $format $ranks $graphs ;; esac
done
layer
