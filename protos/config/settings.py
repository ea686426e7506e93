"""The settings of a rank, one frozen dataclass per concern. Flags, config keys and help are made from these fields by
the launcher, which passes them on as JSON; "auto" values are resolved there once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from allspan.protos.cluster.tls import NO_TLS, TlsFiles


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, and the form in which its weights are held."""

    path: str
    """The model: a Hugging Face folder, a GGUF file, or (for random weights) a folder with a config.json."""
    name: str
    """The name that requests use for the model."""
    dtype: str = "auto"
    """Sets the data type of weights that are not quantised, and of activations: "float32", "bfloat16", "float16" (GPUs
    only), or "auto". "auto" takes the checkpoint's type, except that CPUs hold float16 as float32; beside quantised
    weights it is bfloat16 (on GPUs float16 where the checkpoint is)."""
    max_model_len: int = 0
    """Limits the tokens of a request, prompt and output together; 0 takes the model's own limit."""
    hf_overrides: str = ""
    """Replaces values of the model's config.json: a JSON object, such as {"rope_parameters": {"rope_type": "yarn",
    "factor": 4.0, "original_max_position_embeddings": 32768}}. Nested objects are merged, null removes a key."""
    quantization: str = "auto"
    """Sets how linear weights are held: "none" (as --dtype says), "int8" or "uint4" (weights only), "a8w8" or "a8w4"
    (activations in 8 bits too), "fp8" (weights and activations, on GPUs), "gguf" (the blocks of a GGUF file as they
    are), or "auto". "auto" is "gguf" for a quantised GGUF file, a converted model's own format, and otherwise
    "none"."""
    quantization_group: int = 0
    """Sets how many inputs share a scale: 32, 64, 128, 256, 512, or -1 for all of them. 0 takes the method's default:
    all inputs with 8 bits, 32 with 4 bits."""
    quantize_lm_head: bool = False
    """Holds the head, and an embedding tied to it, in 8 bits with a scale for each token of the vocabulary, whatever
    --quantization says. It cannot be combined with a converted model."""
    load_format: str = "auto"
    """"auto" reads the checkpoint; "dummy" fills the weights with random numbers."""
    device: str = "cpu"
    """Runs the model on the CPU ("cpu") or on NVIDIA GPUs ("cuda")."""
    enforce_eager: bool = False
    """Launches every kernel by itself on a GPU instead of capturing steps in CUDA graphs at the start."""
    disable_cascade_attn: bool = False
    """Turns cascade attention off: on a GPU, a prefix that several decoding requests share is then read once for each
    request."""
    enable_expert_parallel: bool = False
    """Gives ranks whole experts of their own. Without it every rank has a slice of each expert."""
    expert_parallel_size: int = 0
    """Sets the number of groups that share out the experts with --enable-expert-parallel; the ranks of a group have
    slices of the same ones. 0 takes a group for each rank."""
    redundant_experts: int = 0
    """Sets how many copies of experts each layer has beside the experts themselves, with --enable-expert-parallel:
    those with most tokens then lie on several ranks, which share their tokens."""
    expert_load: str = ""
    """Names a JSON file with the tokens that each expert has had, as GET /cluster tells them: ranks then hold those
    experts and copies that give all ranks about the same load."""
    expert_nodes: int = 1
    """Sets the number of hosts for a model whose router takes experts in groups: each host then holds whole groups and
    their copies, so that a token's experts lie on few hosts."""
    rebalance_experts_s: float = 0.0
    """Sets the seconds after which ranks exchange experts again and again, by the tokens of that time, while requests
    go on; 0 leaves experts where they are unless POST /rebalance_experts asks for it."""
    data_parallel_attention: bool = False
    """Has each rank attend for requests of its own, with all heads and the KV of these requests alone, while experts
    and the other weights stay shared out. For models whose KV all ranks would hold (latent attention, few KV heads)."""
    verify: bool = False
    """Reads all weights of a converted model first and compares them with the hash in its manifest."""


HELD_FIELDS = ("dtype", "quantization", "quantization_group")
"""The fields of ModelConfig that decide in which form weights are held; a converted model has its own."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache of one rank."""

    page_size: int = 32
    """Sets the tokens of a KV page: 16, 32, 64 or 128."""
    kv_cache_dtype: str = "auto"
    """Sets the data type of the KV cache: "float32", "bfloat16", "float16" (float16 models only), "int8" or "uint4"
    (both with a scale for each token and KV head), "fp8" (models with latent attention only; a scale for each token),
    or "auto" (as the weights)."""
    kv_cache_bytes: int = 0
    """Sets the bytes of KV cache on each rank. 0 takes 25 % of the node's free memory divided by its ranks, at most
    what --max-num-seqs full contexts need; on a GPU, what --gpu-memory-utilization leaves."""
    gpu_memory_utilization: float = 0.9
    """Sets the share of a GPU's memory that a rank takes for weights, buffers, CUDA graphs and KV cache together."""
    enable_prefix_caching: bool = True
    """Keeps the KV of full pages for later requests that begin with the same tokens."""
    host_kv_cache_bytes: int = 0
    """Sets the bytes of host memory on each rank that hold cached pages for which the device has no room; 0 turns this
    second tier off."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one step."""

    max_num_seqs: int = 0
    """Limits the requests that run at once. 0 takes 64 on CPUs and 256 on GPUs, but no more than
    --max-num-batched-tokens."""
    max_num_batched_tokens: int = 0
    """Limits the tokens of a step, decodes and prefill chunks together. 0 takes 512 on CPUs and 8192 on GPUs, but no
    less than --max-num-seqs."""
    max_queued_requests: int = 1024
    """Limits the requests that wait in the queue; a further one is refused with QueueFull (HTTP 429)."""
    async_scheduling: bool = True
    """Schedules and launches the next step on a GPU before the tokens of this one are known on the host."""
    speculative_config: str = ""
    """Turns speculative decoding on: a JSON object with vLLM's keys, such as {"method": "ngram",
    "prompt_lookup_max": 4, "num_speculative_tokens": 8}, {"method": "draft_model", "model": NAME}, {"method": "eagle3",
    "model": HEAD}, {"method": "mtp"}, or {"method": "suffix"}, for which {} is enough. Answers do not change, on
    GPUs but for near ties."""
    stream_interval: int = 0
    """Streams the tokens of a request this many at a time; the first and the last are sent at once. 0 sends each step's
    tokens with the step, and joins those of several steps only while all processors are busy or the reader lags; 1
    sends each token as it comes even then."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The LoRA adapters that are loaded with the model, and room for those that are loaded while it runs."""

    lora_modules: tuple[str, ...] = ()
    """Loads LoRA adapters with the model: NAME=FOLDER, or {"name": "NAME", "path": "FOLDER"}, for each. A request takes
    one by giving its name as the model."""
    max_lora_rank: int = 16
    """Limits the rank of an adapter; every slot has room for this one."""
    enable_lora: bool = False
    """Makes room for adapters that are loaded while the server runs, as --lora-dir and --max-loras do by themselves."""
    max_loras: int = 0
    """Sets the number of slots on the device: most adapters that a step's requests may have. A request whose adapter
    finds no slot waits until one is free. 0 takes one for each of --lora-modules, or 8 if adapters may be loaded while
    the server runs and that is more; without any of these flags there are none."""
    max_cpu_loras: int = 0
    """Limits the adapters that are loaded at once, in host memory where that is more than there are slots; at least
    --max-loras. 0 takes as many as there are slots or --lora-modules, whichever is more."""
    lora_dir: str = ""
    """Lets adapters be loaded over HTTP and gRPC while the server runs, from folders below this one alone."""


STEP_SIZES = {"cpu": (64, 512), "cuda": (256, 8192)}
"""The defaults of `max_num_seqs` and `max_num_batched_tokens` for each device."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """This rank's place in its world."""

    threads: int = 1
    """Sets the compute threads of this rank."""
    cpus: tuple[int, ...] = ()
    """Pins the threads to these processors; empty leaves them unpinned."""
    collectives: str = "auto"
    """Sets how ranks exchange tensors: "window" (shared memory of one host), "mpi", or "auto", which takes the window
    where it can."""
    pipeline_parallel_size: int = 1
    """Sets the stages of a pipeline, each with --ranks ranks, which hold the model's layers one after the other. For
    hosts without a fast link: only activations go from stage to stage."""
    pipeline_batches: int = 0
    """Sets the batches that are in a pipeline at once, each of other requests; 0 takes two for each stage."""
    timeout_s: float = 60.0
    """Sets the seconds that a collective waits for a peer before the ranks are given up."""
    oversubscribed: bool = False
    """Says that there are more compute threads than processors: a waiting thread then yields at once instead of
    spinning."""
    ranks_on_node: int = 0
    """Says how many ranks of all replicas share this rank's memory; 0 counts those of its own world."""
    memory_node: int = -1
    """Binds this rank's memory to this NUMA node; -1 leaves it as the launcher bound it."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The endpoint of this rank."""

    run_dir: str
    """The cluster's run directory (mode 0700)."""
    epoch: int = 1
    """Counts the worlds that this run directory has seen."""
    host: str = ""
    """The address to listen on over TCP (the port is published); empty listens on a unix socket in the run
    directory."""
    supervisor_pid: int = 0
    """Ends this rank when the process with this id is gone; 0 watches none."""
    watchdog_timeout: float = 30.0
    """Sets the seconds that a rank may be silent, or its busy step loop may make no progress, before the supervisor
    ends all ranks."""
    shutdown_timeout: float = 5.0
    """Sets the seconds that running requests get to finish after SIGTERM."""
    replica: int = -1
    """The index of this rank's world among the cluster's replicas; -1 is the only one."""
    tls: TlsFiles = NO_TLS
    """For TCP: the certificate to show, and the authority that peers' certificates must be from. An open address needs
    it."""
    port: int = 0
    """For TCP: the port of rank 0, which the other ranks' follow; 0 takes any free ones."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All settings of one rank."""

    model: ModelConfig
    service: ServiceConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    adapters: AdapterConfig = AdapterConfig()


class EngineOptions(TypedDict, total=False):
    """The fields of the classes above that a program may set, by name: keyword arguments of both engines and flags of
    `allspan serve`. A test holds them to the fields."""

    dtype: str
    max_model_len: int
    hf_overrides: str
    quantization: str
    quantization_group: int
    quantize_lm_head: bool
    load_format: str
    device: str
    enforce_eager: bool
    disable_cascade_attn: bool
    enable_expert_parallel: bool
    expert_parallel_size: int
    redundant_experts: int
    expert_load: str
    expert_nodes: int
    rebalance_experts_s: float
    data_parallel_attention: bool
    verify: bool
    page_size: int
    kv_cache_dtype: str
    kv_cache_bytes: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    host_kv_cache_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    async_scheduling: bool
    speculative_config: str
    stream_interval: int
    threads: int
    collectives: str
    pipeline_parallel_size: int
    pipeline_batches: int
    timeout_s: float
    lora_modules: tuple[str, ...]
    max_lora_rank: int
    enable_lora: bool
    max_loras: int
    max_cpu_loras: int
    lora_dir: str
    watchdog_timeout: float


CHOICES: dict[str, tuple[str | int, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "dummy"),
    "device": tuple(STEP_SIZES),
    "quantization_group": (0, -1, 32, 64, 128, 256, 512),
    "page_size": (16, 32, 64, 128),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16", "int8", "uint4", "fp8"),
    "collectives": ("auto", "window", "mpi"),
}
"""The allowed values of a field, by its name; flags and config keys refuse anything else."""

LIMITS: dict[str, tuple[float, float]] = {
    "max_model_len": (0, 2**31 - 1),
    "kv_cache_bytes": (0, 2**50),
    "host_kv_cache_bytes": (0, 2**50),
    "gpu_memory_utilization": (0.05, 1.0),
    "max_num_seqs": (0, 4096),
    "max_num_batched_tokens": (0, 1 << 20),
    "max_queued_requests": (1, 1 << 20),
    "stream_interval": (0, 1 << 20),
    "threads": (0, 4096),
    "pipeline_parallel_size": (1, 64),
    "pipeline_batches": (0, 256),
    "max_lora_rank": (1, 256),
    "max_loras": (0, 1024),
    "max_cpu_loras": (0, 65536),
    "redundant_experts": (0, 1 << 16),
    "expert_nodes": (1, 1024),
    "rebalance_experts_s": (0, 10**9),
    "timeout_s": (1, 86400),
    "watchdog_timeout": (1, 86400),
    "shutdown_timeout": (0, 3600),
    "replica": (-1, 1023),
    "port": (0, 65535),
    "memory_node": (-1, 1023),
    "ranks_on_node": (0, 1 << 20),
    "epoch": (0, 2**32 - 1),
    "supervisor_pid": (0, 2**31 - 1),
}
"""Lowest and highest value of a numeric field, by its name, both allowed. `threads` 0: decided by the launcher."""
