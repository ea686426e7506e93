"""`allspan convert MODEL OUT`: packs, quantises and splits the weights once, so that later starts only map them."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.launch.console import say, size
from allspan.launch.models.checkpoint_files import check_files, check_tokenizer
from allspan.launch.models.conversion import ConvertSettings, convert
from allspan.launch.models.find_model import resolve_model
from allspan.launch.models.hub import HubConfig
from allspan.launch.models.local_models import remember_converted
from allspan.launch.settings import add_hub, add_weights
from allspan.protos.api.wording import counted
from allspan.protos.config.flags import Parser, add_options, build
from allspan.protos.config.installed import require_ranks
from allspan.protos.config.settings import ModelConfig


def make_parser() -> Parser:
    parser = Parser(
        "allspan convert",
        "Saves a model's weights as the ranks hold them (packed, quantised, split), for `allspan serve OUT`.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="Names the model: a folder, a GGUF file, a short name, or ORG/NAME."
    )
    parser.add_argument("out", metavar="OUT", help="Names the folder to make.")
    add_options(
        parser,
        ConvertSettings,
        skip=("out",),
        aliases={"ranks": ("-tp", "--tensor-parallel-size")},
        limits={"ranks": (1, 1024), "threads": (0, 4096)},
    )
    add_weights(parser)
    add_hub(parser)
    parser.add_config()
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    require_ranks()
    settings = build(ConvertSettings, namespace)
    model = resolve_model(namespace.model, build(HubConfig, namespace))
    weights = build(ModelConfig, namespace, path="", name="")
    check_files(model.path, weights.load_format != "dummy")
    check_tokenizer(model.path)
    out, ranks = convert(model, weights, settings)
    remember_converted(out)
    say(
        f"{out}: {size(sum(rank['num_bytes'] for rank in ranks))} for {counted(len(ranks), 'rank')}; "
        f"serve it with: allspan serve {out}"
    )
    return 0
