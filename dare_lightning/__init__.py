"""Post-training for diffusion language models: every family, method and decoder under one loop."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, `callbacks/`, `datamodules/` and `conf/` lie beside this folder; installed, they lie inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "callbacks").is_dir():
    __path__.append(str(_checkout))
