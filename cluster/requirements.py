"""What pip would install, read from its report on standard input, as requirements with hashes; see requirements.txt."""

import json
import sys

HEAD = """# What the image is made of (Linux, x86_64, Python 3.11), each file by version and content. From constraints:
#   pip install --dry-run --ignore-installed --only-binary :all: -c constraints.txt --quiet --report - \\
#       setuptools .[tensorboard] | python cluster/requirements.py > cluster/requirements.txt"""


def main() -> None:
    print(HEAD)
    for item in sorted(json.load(sys.stdin)["install"], key=lambda item: item["metadata"]["name"].lower()):
        if archive := item["download_info"].get("archive_info"):  # the folder itself is none
            about = item["metadata"]
            print(f"{about['name']}=={about['version']} --hash=sha256:{archive['hashes']['sha256']}")


main()
