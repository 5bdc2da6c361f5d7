"""Print the requirements of the image (`image`) or of the build (`build`) in pyproject.toml.

The image contains the extra `privacy`, because its file system is read-only.
"""

import sys
import tomllib
from pathlib import Path

content = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
project = content["project"]
requirements = {
    "image": [*project["dependencies"], *project["optional-dependencies"]["privacy"]],
    "build": content["build-system"]["requires"],
}
for name in sys.argv[1:]:
    print(*requirements[name], sep="\n")  # noqa: T201
