"""Print the package requirements (`image`) or build requirements (`build`) in pyproject.toml."""

import sys
import tomllib
from pathlib import Path

TABLES = {"image": ("project", "dependencies"), "build": ("build-system", "requires")}

content = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
for name in sys.argv[1:]:
    table, key = TABLES[name]
    print(*content[table][key], sep="\n")  # noqa: T201
