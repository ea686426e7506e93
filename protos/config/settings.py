"""What a rank is told, one frozen dataclass per concern. Flags, config keys and help are made from these fields by the
launcher, which passes them on as JSON; "auto" values are resolved there once."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.protos.cluster.tls import NO_TLS, TlsFiles


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which form its weights are held."""

    path: str
    """A Hugging Face folder, a GGUF file, or (random weights) a folder with a config.json."""
    name: str
    """The name that requests use."""
    dtype: str = "auto"
    """Of weights that are not quantised: "float32", "bfloat16", "float16" (on GPUs), or "auto" (the checkpoint's, but
    float16 as float32 on CPUs; bfloat16 beside quantised ones, on GPUs float16 where the checkpoint's is)."""
    max_model_len: int = 0
    """Most tokens of a request, prompt and output; 0 takes the model's."""
    quantization: str = "auto"
    """How linear weights are held: "none" (as `dtype` says), "int8", "uint4" (weights alone), "a8w8", "a8w4" (inputs
    in 8 bits too), "fp8" (both, on GPUs), "gguf" (as a GGUF file has them), or "auto" ("gguf" for a quantised GGUF
    file, a converted model's own, else "none")."""
    quantization_group: int = 0
    """Inputs that share a scale: 32, 64, 128, 256, 512, or -1 (all of them); 0: as the method has it (all of them with
    8 bits, 32 with 4)."""
    quantize_lm_head: bool = False
    """Hold the head, and an embedding that is tied to it, in 8 bits, a scale for each token of the vocabulary, whatever
    `quantization` says; not of a converted model."""
    load_format: str = "auto"
    """"auto", or "dummy" for random weights."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    enforce_eager: bool = False
    """On a GPU, launch kernel by kernel: no steps are captured in CUDA graphs at the start."""
    disable_cascade_attn: bool = False
    """On a GPU, decode requests one by one even where they begin with the same tokens and reading these once pays."""
    verify: bool = False
    """Read all of a converted model's weights first, and compare them with the hash in its manifest."""


HELD_FIELDS = ("dtype", "quantization", "quantization_group")
"""Of ModelConfig: what decides in which form weights are held; a converted model has its own."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache of one rank."""

    page_size: int = 32
    """Tokens a page: 16, 32, 64 or 128."""
    kv_cache_dtype: str = "auto"
    """"float32", "bfloat16", "float16" (of float16 models), "int8", "uint4" (both a scale a token and KV head), or
    "auto" (as the weights)."""
    kv_cache_bytes: int = 0
    """Bytes of KV on this rank; 0: min(25 % of the node's free memory / ranks on it, max_num_seqs full contexts), or
    what `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that is taken in all: by weights, buffers, graphs and KV."""
    enable_prefix_caching: bool = True
    """Keep the KV of full pages for requests that begin with the same tokens."""
    host_kv_cache_bytes: int = 0
    """Bytes of host memory on this rank for cached pages that the device has no room for; 0: none."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = 0
    """Most requests that run at once; 0: 64, or 256 on a GPU, but no more than `max_num_batched_tokens`."""
    max_num_batched_tokens: int = 0
    """Token budget of a step, decodes and prefill chunks together; 0: 512, or 8192 on a GPU, but no less than
    `max_num_seqs`."""
    max_queued_requests: int = 1024
    """Most requests that wait; one more is refused with QueueFull."""
    async_scheduling: bool = True
    """On a GPU, send the next step off before this one's tokens are known on the host."""
    stream_interval: int = 0
    """A request's tokens are streamed so many at a time, its first and its last at once; 1: each as it comes; 0: those
    of 30 to 125 ms together, the longer the more requests run."""


STEP_SIZES = {"cpu": (64, 512), "cuda": (256, 8192)}
"""By device: `max_num_seqs` and `max_num_batched_tokens` where nothing else is said."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """This rank's place in its world."""

    threads: int = 1
    """Compute threads of this rank."""
    cpus: tuple[int, ...] = ()
    """Processors that the threads are pinned to; empty: not pinned."""
    collectives: str = "auto"
    """"window" (shared memory of one host), "mpi", or "auto"."""
    timeout_s: float = 60.0
    """How long a collective waits for a peer before the world is given up."""
    oversubscribed: bool = False
    """More compute threads than processors: waiting yields at once instead of spinning."""
    ranks_on_node: int = 0
    """Ranks of all replicas that take from the memory that this rank takes from; 0: counted among this world's."""
    memory_node: int = -1
    """NUMA node whose memory this rank binds itself to; -1: it is bound already, or not to be."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where this rank listens."""

    run_dir: str
    """The cluster's run directory (mode 0700)."""
    epoch: int = 1
    """Counts the worlds that this run directory has seen."""
    host: str = ""
    """Empty: a unix socket in the run directory; else an address to listen on (TCP, the port is published)."""
    supervisor_pid: int = 0
    """Ends when this process is gone; 0: none."""
    watchdog_timeout: float = 30.0
    """Seconds that a rank may be silent, or its busy step loop stand still, before the supervisor ends the world."""
    shutdown_timeout: float = 5.0
    """Seconds that running requests get to finish after SIGTERM."""
    replica: int = -1
    """Index of this rank's world among the cluster's replicas; -1: the only one."""
    tls: TlsFiles = NO_TLS
    """For TCP: the certificate to show, and the authority of those to ask for; an open address needs it."""
    port: int = 0
    """For TCP: rank 0's port, the others' follow; 0: any free ones."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that one rank needs."""

    model: ModelConfig
    service: ServiceConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()


CHOICES: dict[str, tuple[str | int, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "dummy"),
    "device": ("cpu", "cuda"),
    "quantization_group": (0, -1, 32, 64, 128, 256, 512),
    "page_size": (16, 32, 64, 128),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16", "int8", "uint4"),
    "collectives": ("auto", "window", "mpi"),
}
"""What a field may be, by its name; flags and config keys refuse anything else."""

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
