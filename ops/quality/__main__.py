"""`python -m ops.quality`: options in, a table on standard output and a record under docs/quality."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kv_store.codecs.base import Codec
from kv_store.codecs.registry import CODECS, UnknownCodecError, codec_named
from ops.commands.common import ModelOption, command_settings, execute
from ops.downloads.datasets import pull_sharegpt
from ops.measuring import checked_model, prepare_environment, write_record
from pipeline.batch.options import served_name
from pipeline.settings import Settings

DEFAULT_TOKENS = 8192
ALL_CODECS = ",".join(codec.name for codec in CODECS)


def quality(
    *,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare, rounded up to windows.")] = DEFAULT_TOKENS,
    codecs: Annotated[str, typer.Option(help="KV codecs, separated by commas; raw is exact KV.")] = ALL_CODECS,
    model: ModelOption = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the record.")] = True,
    into: Annotated[Path, typer.Option(help="Folder of records, one a model.")] = Path("docs/quality"),
) -> None:
    """Compare the int8 engine with the model's weights in fp32, token by token.

    Mean KL divergence with its 95 % interval, 99th percentile, and how often both predict the same token, for
    each KV codec. Some minutes on two cores.

        python -m ops.quality
        python -m ops.quality --tokens 1024 --codecs raw,int8 --no-save
    """
    chosen = [_codec(name) for name in dict.fromkeys(codecs.split(","))]
    execute(_quality(command_settings(model), chosen, tokens, into if save else None))


def _codec(name: str) -> Codec:
    try:
        return codec_named(name.strip())
    except UnknownCodecError as error:
        raise typer.BadParameter(str(error), param_hint="--codecs") from error


async def _quality(settings: Settings, codecs: list[Codec], num_tokens: int, into: Path | None) -> int:
    prepare_environment(settings)
    # Only now: torch and numba read the environment while they are imported.
    from ops.quality.record import Plan, run  # noqa: PLC0415

    plan = Plan(
        model_name=served_name(settings.model),
        model_path=checked_model(settings),
        weight_cache=settings.weight_cache,
        dataset_path=pull_sharegpt(settings.home, lambda line: print(line, file=sys.stderr)),
        codecs=codecs,
        num_tokens=num_tokens,
        num_threads=settings.engine_threads,
    )
    record, table = run(plan)
    print(table)
    if into is not None:
        path = into / f"{plan.model_name}.json"
        write_record(path, record)
        print(f"\nwritten to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    typer.run(quality)
