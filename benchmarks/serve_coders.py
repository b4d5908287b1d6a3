"""Runs coding agents, unchanged, against `kvarts mock`: one scripted tool call or edit each.

    python benchmarks/serve_coders.py --bin /packages/node_modules/.bin --aider /venvs/aider/bin/aider

`--bin`: the folder with `codex`, `opencode` and `claude` of the npm packages @openai/codex, opencode-ai and
@anthropic-ai/claude-code; agents that are not there are left out. Each agent runs in a new folder with a file, and with
settings and a home of its own. Codex, opencode and Claude Code read the file with a command that the script of the mock
chooses, on /v1/responses, /v1/chat/completions and /v1/messages; aider edits the file. Prints one JSON object per
agent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from serve_agents import start, url_of
from serve_router import stop

QUESTION = "What is the weather of Lund?"
COMMAND = "cat weather.txt"
TOOLS = {
    "exec_command": {"cmd": COMMAND},  # Codex
    "bash": {"command": COMMAND, "description": "Read a file"},  # opencode
    "Bash": {"command": COMMAND, "description": "Read a file"},  # Claude Code
}
EDIT = """calc.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""
BEFORE = "def add(a, b):\n    return a - b\n"


def main() -> None:
    """Run every agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path)
    parser.add_argument("--aider", type=Path)
    options = parser.parse_args()
    rules: list[dict[str, Any]] = [
        {
            "message": f"*{QUESTION}*",
            "turn": 1,
            "tools": [name],
            "reasoning": "The file has it.",
            "text": "I look.",
            "calls": [{"name": name, "arguments": arguments}],
        }
        for name, arguments in TOOLS.items()
    ]
    rules += [{"message": f"*{QUESTION}*", "turn": 2, "text": "It rains in Lund."}]
    rules += [{"message": "*Fix the addition*", "text": EDIT}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.json"
        path.write_text(json.dumps(rules))
        mock = start(["--answers", str(path), "--speedup", "10"])
        try:
            url = url_of(mock)
            for name in ("codex", "opencode", "claude"):
                if options.bin is not None and (options.bin / name).exists():
                    print(json.dumps(outcome(name, options.bin / name, url, Path(folder) / name)), flush=True)
            if options.aider is not None:
                print(json.dumps(outcome("aider", options.aider, url, Path(folder) / "aider")), flush=True)
        finally:
            stop(mock)


def outcome(name: str, program: Path, url: str, folder: Path) -> dict[str, Any]:
    """Run one agent in `folder`, and return what it printed."""
    (folder / "home").mkdir(parents=True)
    (folder / "work").mkdir()
    (folder / "work" / "weather.txt").write_text("rain\n")
    (folder / "work" / "calc.py").write_text(BEFORE)
    of_agents = {
        "codex": {"CODEX_HOME": str(folder / "home")},
        "opencode": {"OPENCODE_CONFIG": str(folder / "work" / "opencode.json")},
        "claude": {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        "aider": {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
    }
    environment = {**os.environ, "HOME": str(folder / "home"), **of_agents[name]}
    environment["PWD"] = str(folder / "work")  # opencode takes its folder from it
    environment.pop("PYTHONPATH", None)
    provider = '{name="kvarts",base_url="' + url + '/v1",wire_api="responses"}'
    model = {"name": "mock", "limit": {"context": 100_000, "output": 4000}}
    settings = {
        "provider": {
            "kvarts": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {"mock": model},
            }
        },
        "model": "kvarts/mock",
        "small_model": "kvarts/mock",
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "work" / "opencode.json").write_text(json.dumps(settings))
    arguments = {
        "codex": [
            "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-c", "model_provider=kvarts",
            "-c", f"model_providers.kvarts={provider}", "-m", "mock", QUESTION,
        ],
        "opencode": ["run", "--format", "json", "--model", "kvarts/mock", QUESTION],
        "claude": [
            "-p", QUESTION, "--model", "mock", "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash",
        ],
        "aider": [
            "--model", "openai/mock", "--edit-format", "diff", "--yes-always", "--no-check-update", "--no-git",
            "--no-show-model-warnings", "--analytics-disable", "--message", "Fix the addition", "calc.py",
        ],
    }  # fmt: skip
    done = subprocess.run(
        [program, *arguments[name]],
        cwd=folder / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    result: dict[str, Any] = {"agent": name, "exit code": done.returncode}
    if done.returncode:
        result["error"] = (done.stderr or done.stdout).splitlines()[-4:]
    if name == "aider":
        return {**result, "file": (folder / "work" / "calc.py").read_text().splitlines()}
    return {**result, "read the file": "rain\\n" in done.stdout or '"rain"' in done.stdout, "said": said(done.stdout)}


def said(text: str) -> list[str]:
    """Return the texts in the JSON that an agent printed."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            event = json.loads(line)
            found.append(event.get("item", event.get("part", event)))
    texts = [str(each.get("text") or each.get("result") or "") for each in found if isinstance(each, dict)]
    return [each for each in texts if each]


if __name__ == "__main__":
    main()
