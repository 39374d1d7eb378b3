"""`python -m ops.warm`: fills the compile cache of a home, so that the first stack starts as fast as the next."""

import os
import subprocess
import sys

from pipeline.errors import SluiceError
from pipeline.settings import load_settings
from stages.common.environment import engine_environment
from stages.gguf.model_files import resolve

WARM_TIMEOUT_S = 600.0  # a slow core compiles for about a minute


def main() -> None:
    """Compile in a process of its own, because the cache's place is fixed when a process starts."""
    try:
        settings = load_settings()
        model_path = resolve(settings.model, settings.home)
    except SluiceError as error:
        sys.exit(str(error))
    command = [sys.executable, "-m", "stages.engine.warm", str(model_path), str(settings.weight_cache)]
    environment = os.environ | engine_environment(settings.home)
    subprocess.run(command, check=True, timeout=WARM_TIMEOUT_S, env=environment)  # noqa: S603


if __name__ == "__main__":
    main()
