"""fa_compiler: finds attention in ONNX graphs and fuses it into FlashAttentionScore."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").exists() and (_ROOT / "op_registry").is_dir():
    # In a checkout the sub-packages lie beside this folder; an installed package has them inside.
    __path__.append(str(_ROOT))
