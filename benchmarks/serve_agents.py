"""Runs third-party agent libraries, unchanged, against `kvarts mock`, and prints the outcome of each.

    python benchmarks/serve_agents.py --python /venvs/agents/bin/python

`--python`: the interpreter of an environment with the libraries that `--only` selects, which does not need kvarts:
openai, anthropic, pydantic-ai-slim[openai,anthropic] and instructor; openai-agents; dspy; haystack-ai; litellm[proxy];
langchain, langchain-openai, langchain-anthropic and langgraph.
Prints one JSON object per library: its output, or the end of its error. `--node`: a folder with node_modules of openai,
ai, @ai-sdk/openai-compatible and zod, for the clients in serve_node.mjs.
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
model = "broken"
fail = "503"

[[answers]]
message = "*Where does dspy go?*"
text = "[[ ## answer ## ]]\\nTo Lund.\\n\\n[[ ## completed ## ]]"

[[answers]]
message = "*As an object*"
text = { city = "Lund", days = 3 }

[[answers]]
message = "Both: *"
tools = ["Trip"]
calls = [
  { name = "Trip", arguments = { city = "Lund", days = 3 } },
  { name = "Trip", arguments = { city = "Kiel", days = 1 } },
]

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
import instructor
mode = instructor.Mode.{mode}
if "ANTHROPIC" in mode.name:
    import anthropic
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"), mode=mode)
else:
    import openai
    client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none"), mode=mode)
of_mode = [("PARALLEL", "Both: "), ("MD_JSON", "As a note: "), ("JSON_SCHEMA", ""), ("JSON", "As an object: ")]
how = next((told for name, told in of_mode if name in mode.name), "")
messages = [{{"role": "user", "content": how + "Where to?"}}]  # the schema is in the prompt alone
asked = dict(model="mock", response_model=Trip, messages=messages)
if "ANTHROPIC" in mode.name:
    asked["max_tokens"] = 4096
trip = client.chat.completions.create(**asked)
assert isinstance(trip, Trip)
print(trip)
"""
INSTRUCTOR_MODES = (
    "TOOLS", "TOOLS_STRICT", "PARALLEL_TOOLS", "FUNCTIONS", "JSON", "JSON_O1", "JSON_SCHEMA", "MD_JSON",
    "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS", "ANTHROPIC_TOOLS",
    "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_JSON", "ANTHROPIC_PARALLEL_TOOLS",
)  # fmt: skip
LANGCHAIN_MODELS = {
    "chats": 'ChatOpenAI(model="mock", base_url=url + "/v1", api_key="none", stream_usage=True)',
    "responses": 'ChatOpenAI(model="mock", base_url=url + "/v1", api_key="none", use_responses_api=True)',
    "messages": 'ChatAnthropic(model="mock", base_url=url, api_key="none", max_tokens=4096)',
}
LANGCHAIN = """
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
model = {model}
"""
LANGCHAIN_AGENT = """
from langchain.agents import create_agent
from langchain.tools import tool
@tool
def weather(city: str) -> str:
    "Return the weather."
    return "rain in " + city
agent = create_agent(model, tools=[weather])
asked = {"messages": [{"role": "user", "content": "How is it?"}]}
print(agent.invoke(asked)["messages"][-1].text)
pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if piece.type == "AIMessageChunk"]
print("".join(piece.text for piece in pieces))
print(sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) > 0)
"""
LANGGRAPH = """
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
@tool
def weather(city: str) -> str:
    "Return the weather."
    return "rain in " + city
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": model.bind_tools([weather]).invoke(state["messages"])})
graph.add_node("tools", ToolNode([weather]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
chat = graph.compile(checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
print([message.type for message in chat.invoke({"messages": [("user", "How is it?")]}, thread)["messages"]])
print([message.type for message in chat.get_state(thread).values["messages"]][-1])
"""
AGENTS = """
from openai import AsyncOpenAI
from agents import Agent, {kind}, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
@function_tool
def weather(city: str) -> str:
    "Return the weather."
    return "rain in " + city
model = {kind}(model="mock", openai_client=AsyncOpenAI(base_url=url + "/v1", api_key="none"))
agent = Agent(name="one", instructions="Help.", tools=[weather], model=model)
import asyncio
async def both():
    print((await Runner.run(agent, "How is it?")).final_output)
    run = Runner.run_streamed(agent, "How is it?")
    kinds = {{event.type async for event in run.stream_events()}}
    print(run.final_output, *sorted(kinds))
asyncio.run(both())
"""
LITELLM_MODELS = """
def model(name, base, asked):
    params = {"model": "openai/" + asked, "api_base": base + "/v1", "api_key": "none"}
    return {"model_name": name, "litellm_params": params}
models = [model("small", small, "mock"), model("large", url, "mock"), model("broken", url, "broken")]
long = [{"role": "user", "content": "a long text " * 200}]
short = [{"role": "user", "content": "a short text"}]
"""
CLIENTS = {
    **{
        f"openai-agents, an agent on {name}": AGENTS.format(kind=kind)
        for name, kind in (("responses", "OpenAIResponsesModel"), ("chats", "OpenAIChatCompletionsModel"))
    },
    "dspy, a prediction": """
import dspy
dspy.configure(lm=dspy.LM("openai/mock", api_base=url + "/v1", api_key="none", cache=False))
print(dspy.Predict("question -> answer")(question="Where does dspy go?").answer)
""",
    "haystack, an agent": """
from typing import Annotated
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
@tool
def weather(city: Annotated[str, "the city"]) -> str:
    "Return the weather."
    return "rain in " + city
pieces = []
for more in ({}, {"streaming_callback": lambda chunk: pieces.append(chunk.content)}):
    generator = OpenAIChatGenerator(model="mock", api_base_url=url + "/v1", api_key=Secret.from_token("none"), **more)
    agent = Agent(chat_generator=generator, tools=[weather])
    print(agent.run(messages=[ChatMessage.from_user("How is it?")])["messages"][-1].text)
print("".join(pieces))
""",
    "litellm, a router with fallbacks": f"""
import litellm
{LITELLM_MODELS}
router = litellm.Router(model_list=models, num_retries=0, fallbacks=[{{"broken": ["large"]}}],
                        context_window_fallbacks=[{{"small": ["large"]}}])
for name, messages in (("small", short), ("small", long), ("broken", short)):
    answer = router.completion(model=name, messages=messages, max_tokens=8)
    print(name, answer.usage.prompt_tokens, len(answer.choices[0].message.content.split()))
stream = router.completion(model="small", messages=short, max_tokens=8, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
""",
    "litellm, its proxy with fallbacks": f"""
import json, os, socket, subprocess, sys, tempfile, time, urllib.request
{LITELLM_MODELS}
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
settings = {{"model_list": models, "litellm_settings": {{"num_retries": 0, "telemetry": False,
            "fallbacks": [{{"broken": ["large"]}}], "context_window_fallbacks": [{{"small": ["large"]}}]}}}}
with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    json.dump(settings, file)
    file.flush()
    log = tempfile.TemporaryFile()
    litellm = os.path.join(os.path.dirname(sys.executable), "litellm")
    key = "sk-" + os.urandom(16).hex()
    os.environ |= {{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}}
    proxy = subprocess.Popen([litellm, "--config", file.name, "--port", str(port)], stdout=log, stderr=log)
    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {{"content-type": "application/json", "authorization": "Bearer " + key}}
        asked = urllib.request.Request(f"http://127.0.0.1:{{port}}" + path, data, headers)
        return json.load(urllib.request.urlopen(asked, timeout=60))
    try:
        for _ in range(400):
            try:
                ask("/health/liveliness")
                break
            except OSError:
                time.sleep(0.5)
        for name, messages in (("small", short), ("small", long), ("broken", short)):
            answer = ask("/v1/chat/completions", {{"model": name, "messages": messages, "max_tokens": 8}})
            print(name, answer["usage"]["prompt_tokens"], len(answer["choices"][0]["message"]["content"].split()))
    finally:
        proxy.terminate()
        proxy.wait()
""",
    **{
        f"langchain, an agent on {name}": LANGCHAIN.format(model=model) + LANGCHAIN_AGENT
        for name, model in LANGCHAIN_MODELS.items()
    },
    **{
        f"langgraph, a graph on {name}": LANGCHAIN.format(model=model) + LANGGRAPH
        for name, model in LANGCHAIN_MODELS.items()
    },
    **{
        f"langchain, a typed output by {method}": f"{TRIP}{LANGCHAIN.format(model=LANGCHAIN_MODELS['chats'])}"
        f"print(model.with_structured_output(Trip, method={method!r}).invoke({asked!r}))"
        for method, asked in (
            ("json_schema", "Where to?"),
            ("function_calling", "Where to?"),
            ("json_mode", "As an object: where to?"),
        )
    },
    "langchain, embeddings": """
from langchain_openai import OpenAIEmbeddings
made = OpenAIEmbeddings(model="mock", base_url=url + "/v1", api_key="none", check_embedding_ctx_length=False)
made = made.embed_documents(["one", "two words"])  # without the check, for which tiktoken downloads a file
print(len(made), len(made[0]))
""",
    **{f"pydantic-ai, an agent on {name}": AGENT.format(model=model) for name, model in MODELS.items()},
    **{
        f"pydantic-ai, a typed output on {name}": f"{TRIP}{model}\nfrom pydantic_ai import Agent\n"
        'print(Agent(model, output_type=Trip).run_sync("Where to?").output)'
        for name, model in MODELS.items()
    },
    **{f"instructor, mode {mode}": TRIP + INSTRUCTOR.format(mode=mode) for mode in INSTRUCTOR_MODES},
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
for each in ("PARALLEL_TOOLS", "ANTHROPIC_PARALLEL_TOOLS"):
    CLIENTS[f"instructor, mode {each}"] = CLIENTS[f"instructor, mode {each}"].replace(
        "trip = client.chat.completions.create(**asked)",
        "from typing import Iterable\nasked['response_model'] = Iterable[Trip]\n"
        "trip, other = client.chat.completions.create(**asked)",
    )


def main() -> None:
    """Start a mock, run every client, and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--node", type=Path)
    parser.add_argument("--only", default="", help="clients with this in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "answers.toml"
        rules.write_text(RULES)
        settings: tuple[list[str], ...] = (
            ["--answers", str(rules), "--served-model-name", "broken"],
            ["--max-model-len", "256"],  # requests that are too long for it go elsewhere
        )
        mocks = [start(each) for each in settings]
        try:
            url, small = map(url_of, mocks)
            for name, program in CLIENTS.items():
                if options.only in name:
                    run(name, [options.python, "-c", f"url, small = {url!r}, {small!r}\n{program}"])
            script = Path(__file__).with_name("serve_node.mjs")
            for library in ("openai", "ai") if options.node is not None else ():
                if options.only in (name := f"node, {library}"):
                    run(name, ["node", script, url, options.node.resolve(), library])
        finally:
            for mock in mocks:
                mock.terminate()
                mock.wait(30)


def start(options: list[str]) -> subprocess.Popen[str]:
    """Start a mock."""
    command = [sys.executable, "-m", "kvarts", "mock", "--port", "0", "--served-model-name", "mock", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def url_of(mock: subprocess.Popen[str]) -> str:
    """Return where a mock listens."""
    assert mock.stderr is not None
    said = next(word for line in mock.stderr for word in line.split() if word.startswith("http://"))
    return said.rstrip(".,").removesuffix("/v1")


def run(name: str, command: list[str | Path]) -> None:
    """Run one client, and print its outcome."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    outcome = {"client": name, "exit code": done.returncode, "printed": done.stdout.splitlines()}
    if done.returncode:
        outcome["error"] = done.stderr.splitlines()[-3:]
    print(json.dumps(outcome, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
