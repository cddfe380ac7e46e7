# Completion for bash: source it, or put it where bash-completion looks.
_rankxform() {
    local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} words=""
    case "$verb" in
        strategy|maps)
            [ "$COMP_CWORD" -gt 2 ] && verb="$verb ${COMP_WORDS[2]}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "transform verify launch follow clean plan ranks merge strategy maps inspect hostfile --help --version" -- "$word"))
        return
    fi
    case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in
        "transform --unmatched") words="error drop replicate" ;;
        "transform --unlisted") words="error take-one" ;;
        "transform --names") words="as-stored mindspore torch hyperparallel" ;;
        "transform --qkv") words="grouped contiguous" ;;
        "transform --gate-up") words="interleaved contiguous" ;;
        "transform --experts") words="apart stacked transposed" ;;
        "transform --towers") words="keep drop" ;;
        "transform --dtype") words="bf16 fp16 fp32" ;;
        "transform --vocab-fill") words="zeros repeat-last" ;;
        "transform --unsharded") words="cp" ;;
        "transform --src-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel dcp_safetensors torch_dist pytorch megatron verl meta vllm" ;;
        "transform --dst-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel torch_dist vllm" ;;
        "transform --platform") words="cuda ascend" ;;
        "transform --transformer-impl") words="transformer_engine local" ;;
        "transform --format") words="ckpt safetensors" ;;
        "transform --link") words="reflink hard none" ;;
        "transform --writers") words="auto node any" ;;
        "transform --read-method") words="auto ranges sieving two-phase" ;;
        "transform --digests") words="sha256 xxh3" ;;
        "transform --progress") words="auto bar lines none" ;;
        "verify --unmatched") words="error drop replicate" ;;
        "verify --unlisted") words="error take-one" ;;
        "verify --names") words="as-stored mindspore torch hyperparallel" ;;
        "verify --qkv") words="grouped contiguous" ;;
        "verify --gate-up") words="interleaved contiguous" ;;
        "verify --experts") words="apart stacked transposed" ;;
        "verify --towers") words="keep drop" ;;
        "verify --dtype") words="bf16 fp16 fp32" ;;
        "verify --vocab-fill") words="zeros repeat-last" ;;
        "verify --unsharded") words="cp" ;;
        "verify --src-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel dcp_safetensors torch_dist pytorch megatron verl meta vllm" ;;
        "verify --dst-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel torch_dist vllm" ;;
        "verify --platform") words="cuda ascend" ;;
        "verify --transformer-impl") words="transformer_engine local" ;;
        "verify --format") words="ckpt safetensors" ;;
        "verify --link") words="reflink hard none" ;;
        "verify --writers") words="auto node any" ;;
        "verify --read-method") words="auto ranges sieving two-phase" ;;
        "verify --progress") words="auto bar lines none" ;;
        "launch --unmatched") words="error drop replicate" ;;
        "launch --unlisted") words="error take-one" ;;
        "launch --names") words="as-stored mindspore torch hyperparallel" ;;
        "launch --qkv") words="grouped contiguous" ;;
        "launch --gate-up") words="interleaved contiguous" ;;
        "launch --experts") words="apart stacked transposed" ;;
        "launch --towers") words="keep drop" ;;
        "launch --dtype") words="bf16 fp16 fp32" ;;
        "launch --vocab-fill") words="zeros repeat-last" ;;
        "launch --unsharded") words="cp" ;;
        "launch --src-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel dcp_safetensors torch_dist pytorch megatron verl meta vllm" ;;
        "launch --dst-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel torch_dist vllm" ;;
        "launch --platform") words="cuda ascend" ;;
        "launch --transformer-impl") words="transformer_engine local" ;;
        "launch --format") words="ckpt safetensors" ;;
        "launch --link") words="reflink hard none" ;;
        "launch --writers") words="auto node any" ;;
        "launch --read-method") words="auto ranges sieving two-phase" ;;
        "launch --progress") words="auto bar lines none" ;;
        "follow --unmatched") words="error drop replicate" ;;
        "follow --unlisted") words="error take-one" ;;
        "follow --names") words="as-stored mindspore torch hyperparallel" ;;
        "follow --qkv") words="grouped contiguous" ;;
        "follow --gate-up") words="interleaved contiguous" ;;
        "follow --experts") words="apart stacked transposed" ;;
        "follow --towers") words="keep drop" ;;
        "follow --dtype") words="bf16 fp16 fp32" ;;
        "follow --vocab-fill") words="zeros repeat-last" ;;
        "follow --unsharded") words="cp" ;;
        "follow --src-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel dcp_safetensors torch_dist pytorch megatron verl meta vllm" ;;
        "follow --dst-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel torch_dist vllm" ;;
        "follow --platform") words="cuda ascend" ;;
        "follow --transformer-impl") words="transformer_engine local" ;;
        "follow --format") words="ckpt safetensors" ;;
        "follow --link") words="reflink hard none" ;;
        "follow --writers") words="auto node any" ;;
        "follow --read-method") words="auto ranges sieving two-phase" ;;
        "follow --digests") words="sha256 xxh3" ;;
        "follow --progress") words="auto bar lines none" ;;
        "plan --unmatched") words="error drop replicate" ;;
        "plan --unlisted") words="error take-one" ;;
        "plan --names") words="as-stored mindspore torch hyperparallel" ;;
        "plan --qkv") words="grouped contiguous" ;;
        "plan --gate-up") words="interleaved contiguous" ;;
        "plan --experts") words="apart stacked transposed" ;;
        "plan --towers") words="keep drop" ;;
        "plan --dtype") words="bf16 fp16 fp32" ;;
        "plan --vocab-fill") words="zeros repeat-last" ;;
        "plan --unsharded") words="cp" ;;
        "plan --src-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel dcp_safetensors torch_dist pytorch megatron verl meta vllm" ;;
        "plan --dst-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel torch_dist vllm" ;;
        "plan --platform") words="cuda ascend" ;;
        "plan --transformer-impl") words="transformer_engine local" ;;
        "plan --format") words="ckpt safetensors" ;;
        "plan --link") words="reflink hard none" ;;
        "plan --writers") words="auto node any" ;;
        "plan --read-method") words="auto ranges sieving two-phase" ;;
        "plan --src-placement") words="shared node" ;;
        "ranks --unmatched") words="error drop replicate" ;;
        "strategy derive --unsharded") words="cp" ;;
        "maps check --qkv") words="grouped contiguous" ;;
        "maps check --gate-up") words="interleaved contiguous" ;;
        "maps check --src-form") words="ranks checkpoint2 unified huggingface dcp hyperparallel dcp_safetensors torch_dist pytorch megatron verl meta vllm" ;;
        "hostfile --style") words="openmpi mpich" ;;
    esac
    [ -z "$words" ] && case "$verb" in
        strategy) words="derive explain show convert diff presets" ;;
        maps) words="list show check" ;;
    esac
    [ -z "$words" ] && [ "${word:0:1}" = - ] && case "$verb" in
        "transform") words="--help --report --json -n --processes --hostfile --src-strategy --src-ckpt-strategy --src-strategy-file --src-strategy-dir --dst-strategy --dst-ckpt-strategy --dst-strategy-file --dst-strategy-dir --ranks --unmatched --include --exclude --rename --unlisted --map --names --config --like --qkv --gate-up --variant --experts --towers --weights-only --no-optimizer --masters --dtype --keep-dtype --cast-states --lora --lora-alpha --lora-rank --lora-strategy --vocab --vocab-fill --vocab-cut --dst-parallel --dst-config --src-parallel --src-config --preset --unproven --rule --predict --optimizer-shard --opt-on --opt-off --threshold --src-threshold --layers-per-stage --unsharded --src-form --fallback --src-pattern --step --suffix --check-crc --accept --dst-form --prefix --max-part --max-shard --tensor-parallel --pipeline-parallel --expert-parallel --vllm-version --platform --transformer-impl --dedup --iteration --format --link --dst-placement --writers --read-method --costs --memory --endpoint-url --storage-option --throttle --overwrite --no-lock --no-fsync --crc --verify --digests --config-file --dry-run --profile --time-limit --stall-limit --progress -v --verbose -q --quiet" ;;
        "verify") words="--help --report --subset --json -n --processes --hostfile --src-strategy --src-ckpt-strategy --src-strategy-file --src-strategy-dir --dst-strategy --dst-ckpt-strategy --dst-strategy-file --dst-strategy-dir --ranks --unmatched --include --exclude --rename --unlisted --map --names --config --like --qkv --gate-up --variant --experts --towers --weights-only --no-optimizer --masters --dtype --keep-dtype --cast-states --lora --lora-alpha --lora-rank --lora-strategy --vocab --vocab-fill --vocab-cut --dst-parallel --dst-config --src-parallel --src-config --preset --unproven --rule --predict --optimizer-shard --opt-on --opt-off --threshold --src-threshold --layers-per-stage --unsharded --src-form --fallback --src-pattern --step --suffix --check-crc --accept --dst-form --prefix --max-part --max-shard --tensor-parallel --pipeline-parallel --expert-parallel --vllm-version --platform --transformer-impl --dedup --iteration --format --link --dst-placement --writers --read-method --costs --memory --endpoint-url --storage-option --throttle --crc --keep-fingerprints --config-file --time-limit --stall-limit --progress -v --verbose -q --quiet" ;;
        "launch") words="--help --load --output --uses-mpi --any-world-size --json --src-strategy --src-ckpt-strategy --src-strategy-file --src-strategy-dir --dst-strategy --dst-ckpt-strategy --dst-strategy-file --dst-strategy-dir --ranks --unmatched --include --exclude --rename --unlisted --map --names --config --like --qkv --gate-up --variant --experts --towers --weights-only --no-optimizer --masters --dtype --keep-dtype --cast-states --lora --lora-alpha --lora-rank --lora-strategy --vocab --vocab-fill --vocab-cut --dst-parallel --dst-config --src-parallel --src-config --preset --unproven --rule --predict --optimizer-shard --opt-on --opt-off --threshold --src-threshold --layers-per-stage --unsharded --src-form --fallback --src-pattern --step --suffix --check-crc --accept --dst-form --prefix --max-part --max-shard --tensor-parallel --pipeline-parallel --expert-parallel --vllm-version --platform --transformer-impl --dedup --iteration --format --link --dst-placement --writers --read-method --costs --memory --endpoint-url --storage-option --throttle --overwrite --no-fsync --config-file --time-limit --stall-limit --progress -v --verbose -q --quiet" ;;
        "follow") words="--help --watch --settle --keep --json -n --processes --hostfile --src-strategy --src-ckpt-strategy --src-strategy-file --src-strategy-dir --dst-strategy --dst-ckpt-strategy --dst-strategy-file --dst-strategy-dir --ranks --unmatched --include --exclude --rename --unlisted --map --names --config --like --qkv --gate-up --variant --experts --towers --weights-only --no-optimizer --masters --dtype --keep-dtype --cast-states --lora --lora-alpha --lora-rank --lora-strategy --vocab --vocab-fill --vocab-cut --dst-parallel --dst-config --src-parallel --src-config --preset --unproven --rule --predict --optimizer-shard --opt-on --opt-off --threshold --src-threshold --layers-per-stage --unsharded --src-form --fallback --src-pattern --step --suffix --check-crc --accept --dst-form --prefix --max-part --max-shard --tensor-parallel --pipeline-parallel --expert-parallel --vllm-version --platform --transformer-impl --dedup --iteration --format --link --dst-placement --writers --read-method --costs --memory --endpoint-url --storage-option --throttle --overwrite --no-lock --no-fsync --crc --verify --digests --config-file --time-limit --stall-limit --progress -v --verbose -q --quiet" ;;
        "clean") words="--help --json --endpoint-url --storage-option" ;;
        "plan") words="--help --report -n --processes -v --verbose --prove --json --src-strategy --src-ckpt-strategy --src-strategy-file --src-strategy-dir --dst-strategy --dst-ckpt-strategy --dst-strategy-file --dst-strategy-dir --ranks --unmatched --include --exclude --rename --unlisted --map --names --config --like --qkv --gate-up --variant --experts --towers --weights-only --no-optimizer --masters --dtype --keep-dtype --cast-states --lora --lora-alpha --lora-rank --lora-strategy --vocab --vocab-fill --vocab-cut --dst-parallel --dst-config --src-parallel --src-config --preset --unproven --rule --predict --optimizer-shard --opt-on --opt-off --threshold --src-threshold --layers-per-stage --unsharded --src-form --fallback --src-pattern --step --suffix --check-crc --accept --dst-form --prefix --max-part --max-shard --tensor-parallel --pipeline-parallel --expert-parallel --vllm-version --platform --transformer-impl --dedup --iteration --format --link --dst-placement --writers --read-method --costs --memory --endpoint-url --storage-option --shapes --config-file --simulate --nodes --src-placement" ;;
        "ranks") words="--help --json --src-strategy --src-ckpt-strategy --src-strategy-file --src-strategy-dir --dst-strategy --dst-ckpt-strategy --dst-strategy-file --dst-strategy-dir --ranks --include --exclude --rename --unmatched --src-pattern --step --suffix --fallback" ;;
        "merge") words="--help --overwrite --json" ;;
        "strategy derive") words="--help --from --src-strategy -o --output --shapes --json --dst-parallel --dst-config --src-parallel --src-config --preset --unproven --rule --predict --optimizer-shard --opt-on --opt-off --threshold --src-threshold --layers-per-stage --unsharded" ;;
        "strategy explain") words="--help --shapes --json --src-parallel --src-config --preset" ;;
        "strategy show") words="--help --raw --json" ;;
        "strategy convert") words="--help --shapes --json" ;;
        "strategy diff") words="--help --json" ;;
        "strategy presets") words="--help --json" ;;
        "maps list") words="--help --json" ;;
        "maps show") words="--help --json" ;;
        "maps check") words="--help --src-strategy --src-ckpt-strategy --json --exclude --config --qkv --gate-up --weights-only --no-optimizer --vocab --step --src-form" ;;
        "inspect") words="--help --replicas --check --full -v --verbose --page --beside --beside-strategy --raw --src-strategy --src-ckpt-strategy --json --map --config --src-pattern --step --suffix --fallback --endpoint-url --storage-option" ;;
        "hostfile") words="--help --style --slots --json" ;;
    esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
        compopt -o filenames 2> /dev/null
    fi
}
complete -F _rankxform rankxform
