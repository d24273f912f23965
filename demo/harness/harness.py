#!/usr/bin/env python3
"""The agent's tools in the sandbox: look, test, edit, fetch, changed. Each prints a JSON line.

Standard library only, since it runs in whatever image the task brings.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.request


def look(path):
    entries = sorted(os.listdir(path))
    return {"path": path, "entries": entries[:100], "dropped": max(0, len(entries) - 100)}


def test(repo):
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "toolz"]
    done = subprocess.run(argv, cwd=repo, capture_output=True, text=True)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    failures = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
    return {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "failures": failures[:10],
        "exit": done.returncode,
    }


def edit(path):
    change = json.load(sys.stdin)
    with open(path) as file:
        text = file.read()
    if text.count(change["old"]) != 1:
        return {
            "error": f"the old text occurs {text.count(change['old'])} times in {path}, not once"
        }
    with open(path, "w") as file:
        file.write(text.replace(change["old"], change["new"]))
    return {"edited": path}


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return {"url": url, "status": answer.status, "bytes": len(answer.read())}
    except OSError as err:
        return {"url": url, "refused": str(getattr(err, "reason", err))}


def changed(repo):
    """Files that differ from the manifest that the workspace layer brought."""
    with open(os.path.join(repo, ".manifest.json")) as file:
        manifest = json.load(file)
    found = []
    for name, digest in sorted(manifest.items()):
        try:
            with open(os.path.join(repo, name), "rb") as file:
                if hashlib.sha256(file.read()).hexdigest() != digest:
                    found.append(name)
        except FileNotFoundError:
            found.append(name)
    return {"changed": found}


if __name__ == "__main__":
    tools = {"look": look, "test": test, "edit": edit, "fetch": fetch, "changed": changed}
    if len(sys.argv) < 3 or sys.argv[1] not in tools:
        sys.exit("usage: harness look|test|edit|fetch|changed ARGUMENT")
    print(json.dumps(tools[sys.argv[1]](sys.argv[2])))
