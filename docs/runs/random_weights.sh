# What the scripts beside this one share: folders of models that have a config alone, and measurements of clusters whose
# weights are random. To be read by them, whose first argument is OUT; docs/runs/mixtures.sh has the variables.
out=$(mkdir -p "$1" && cd "$1" && pwd)
batches=${BATCHES:-1x1024x257,1x8192x1,8x1024x256,64x1024x256,256x1024x256}

# model NAME COMMAND: sets `model` to the folder OUT/NAME, whose config.json is what COMMAND prints. Its tokenizer knows
# bytes alone: prompts and answers are token ids.
model() {
  model=$out/$1
  mkdir -p "$model"
  "$2" > "$model/config.json"
  "${PYTHON:-python3}" - "$model/tokenizer.json" << 'END_OF_PROGRAM'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.save(sys.argv[1])
END_OF_PROGRAM
}

# qwen2_config HIDDEN LAYERS HEADS KV_HEADS INTERMEDIATE VOCABULARY: a config.json of Qwen2
qwen2_config() {
  cat << END
{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": $1, "num_hidden_layers": $2,
 "num_attention_heads": $3, "num_key_value_heads": $4, "intermediate_size": $5, "vocab_size": $6,
 "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
 "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END
}

# Of Qwen2.5-7B's shape, and of a trial's on a CPU.
qwen() {
  qwen2_config 3584 28 28 4 18944 152064
}

tiny() {
  qwen2_config 128 2 4 2 256 512
}

# bench NAME CASE FLAG …: what `allspan bench NAME` says of `model` goes to OUT/CASE-NAME.json.
bench() {
  name=$1 file=$out/$2-$1.json
  shift 2
  # shellcheck disable=SC2086  # FLAGS are several words
  "${ALLSPAN:-allspan}" bench "$name" "$model" --load-format dummy --max-model-len 16384 --max-num-seqs 256 \
    --max-num-batched-tokens 8192 --no-enable-prefix-caching --quiet --json "$@" ${FLAGS:---device cuda} > "$file"
  tail -n 1 "$file"
}

# trace CASE FLAG …: with the variable TRACE, 600 requests with the lengths of that file, all sent at once.
trace() {
  [ -z "${TRACE:-}" ] || bench serve "$@" --backend grpc --dataset-name trace --dataset-path "$TRACE" \
    --num-prompts "${PROMPTS:-600}" --trace-speedup inf
}
