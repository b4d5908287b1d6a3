"""Runs third-party agent libraries, unchanged, against `kvarts mock`, and prints the outcome of each.

    python benchmarks/serve_agents.py --python /venvs/agents/bin/python

`--python`: the interpreter of an environment with openai, anthropic, pydantic-ai-slim[openai,anthropic] and instructor,
which does not need kvarts. Prints one JSON object per library: its output, or the end of its error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RULES = """
[[answers]]
message = "How is it*"
tools = ["weather"]
turn = 1
reasoning = "Rain, perhaps."
text = "Let me look."
calls = [{ name = "weather", arguments = { city = "Lund" } }, { name = "weather", arguments = { city = "Kiel" } }]

[[answers]]
message = "How is it*"
tools = ["weather"]
turn = 2
text = "It rains in both."

[[answers]]
message = "As an object*"
text = { city = "Lund", days = 3 }

[[answers]]
message = "As a note*"
text = "Here it is:\\n```json\\n{\\"city\\": \\"Lund\\", \\"days\\": 3}\\n```\\n"
"""
TRIP = """
from pydantic import BaseModel
class Trip(BaseModel):
    city: str
    days: int
"""
AGENT = """
from pydantic_ai import Agent
{model}
agent = Agent(model)
@agent.tool_plain
def weather(city: str) -> str:
    "Return the weather."
    return "rain in " + city
print(agent.run_sync("How is it?").output)
import asyncio
async def streamed():
    async with agent.run_stream("How is it?") as run:
        return [text async for text in run.stream_text(delta=True, debounce_by=None)]
print("".join(asyncio.run(streamed())))
"""
OPENAI_MODEL = """
from pydantic_ai.models.openai import {kind}
from pydantic_ai.providers.openai import OpenAIProvider
model = {kind}("mock", provider=OpenAIProvider(base_url=url + "/v1", api_key="none"))
"""
ANTHROPIC_MODEL = """
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
model = AnthropicModel("mock", provider=AnthropicProvider(base_url=url, api_key="none"))
"""
MODELS = {
    "chats": OPENAI_MODEL.format(kind="OpenAIChatModel"),
    "responses": OPENAI_MODEL.format(kind="OpenAIResponsesModel"),
    "messages": ANTHROPIC_MODEL,
}
INSTRUCTOR = """
import instructor, openai
client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none"), mode=instructor.Mode.{mode})
how = {{"JSON": "As an object: ", "MD_JSON": "As a note: "}}.get("{mode}", "")  # their schema is in the prompt
messages = [{{"role": "user", "content": how + "Where to?"}}]
asked = dict(model="mock", response_model=Trip, messages=messages)
trip = client.chat.completions.create(**asked)
assert isinstance(trip, Trip)
print(trip)
"""
CLIENTS = {
    **{f"pydantic-ai, an agent on {name}": AGENT.format(model=model) for name, model in MODELS.items()},
    **{
        f"pydantic-ai, a typed output on {name}": f"{TRIP}{model}\nfrom pydantic_ai import Agent\n"
        'print(Agent(model, output_type=Trip).run_sync("Where to?").output)'
        for name, model in MODELS.items()
    },
    **{
        f"instructor, mode {mode}": TRIP + INSTRUCTOR.format(mode=mode)
        for mode in ("TOOLS", "TOOLS_STRICT", "PARALLEL_TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON")
    },
    "anthropic, a stream with tools": """
import anthropic
tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
asked = dict(model="mock", max_tokens=9999, tools=[tool], messages=[{"role": "user", "content": "How is it?"}])
client = anthropic.Anthropic(base_url=url, api_key="none")
with client.messages.stream(**asked) as stream:
    message = stream.get_final_message()
print([block.type for block in message.content], message.content[2].input)
results = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"} for block in message.content[2:]]
asked["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
print(client.messages.create(**asked).content[0].text)
""",
}
CLIENTS["instructor, mode PARALLEL_TOOLS"] = CLIENTS["instructor, mode PARALLEL_TOOLS"].replace(
    "trip = client.chat.completions.create(**asked)",
    "from typing import Iterable\nasked['response_model'] = Iterable[Trip]\n"
    "trip = next(iter(client.chat.completions.create(**asked)))",
)


def main() -> None:
    """Start a mock, run every client, and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--only", default="", help="clients with this in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "answers.toml"
        rules.write_text(RULES)
        command = [sys.executable, "-m", "kvarts", "mock", "--port", "0", "--served-model-name", "mock"]
        mock = subprocess.Popen([*command, "--answers", str(rules)], stderr=subprocess.PIPE, text=True)
        try:
            assert mock.stderr is not None
            said = next(word for line in mock.stderr for word in line.split() if word.startswith("http://"))
            url = said.rstrip(".,").removesuffix("/v1")
            for name, program in CLIENTS.items():
                if options.only in name:
                    run(name, options.python, f"url = {url!r}\n{program}")
        finally:
            mock.terminate()
            mock.wait(30)


def run(name: str, python: Path, program: str) -> None:
    """Run one client, and print its outcome."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    outcome = {"client": name, "exit code": done.returncode, "printed": done.stdout.splitlines()}
    if done.returncode:
        outcome["error"] = done.stderr.splitlines()[-3:]
    print(json.dumps(outcome, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
