"""Whole answers as models write them, and what a client should make of each."""
# ruff: noqa: E501 (an answer stands on one line, to be compared with a model's template)

from dataclasses import dataclass

CITY = {"city": 'San "F"\nX', "days": 3, "metric": True}
CITY_JSON = '{"city": "San \\"F\\"\\nX", "days": 3, "metric": true}'
TWO = (("get_weather", CITY), ("ping", {}))


@dataclass(frozen=True)
class Case:
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, object], ...] = ()
    tools: str | None = None
    thinks: str | None = None
    prompt: str = ""
    reason: str = "stop"
    finish: str | None = None  # "tool_calls" if there are calls, else the reason

    def __str__(self) -> str:
        return f"{self.tools or ''}-{self.thinks or ''}-{self.text[:40]!r}"


def _tools(name: str, text: str, calls: tuple[tuple[str, object], ...] = TWO, **fields: object) -> Case:
    return Case(text, tools=name, calls=calls, **fields)  # type: ignore[arg-type]


HERMES_CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)
CODER_CALLS = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nSan "F"\nX\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "<parameter=metric>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
)
GLM_CALLS = (
    '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>San "F"\nX</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>3</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n"
    "<tool_call>ping\n</tool_call>"
)
PARALLEL = f'[{{"name": "get_weather", "arguments": {CITY_JSON}}}, {{"name": "ping", "arguments": {{}}}}]'
PYTHON = "get_weather(city='San \"F\"\\nX', days=3, metric=True)"

WELL_FORMED = [
    _tools("hermes", HERMES_CALLS),
    _tools("hermes", f"Let me look.\n\n{HERMES_CALLS}", content="Let me look."),
    _tools("hermes", '<tool_call>{"name": "ping"}</tool_call>', (("ping", {}),)),
    _tools("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', (("ping", {}),)),
    _tools("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', (("f", {"a": 1}),)),
    _tools("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', (("f", {"a": 1}),)),
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": "one\ntwo"}}</tool_call>', (("f", {"a": "one\ntwo"}),)),
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', (("f", {"a": 1}),)),
    _tools("hermes", 'A<tool_call>{"name": "ping"}</tool_call>\nB', (("ping", {}),), content="A\nB"),
    _tools("llama3_json", f'{{"name": "get_weather", "parameters": {CITY_JSON}}}; {{"name": "ping", "parameters": {{}}}}'),
    _tools("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', (("f", {"a": 1}),)),
    _tools("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', (("f", {"a": 1}),)),
    _tools("pythonic", f"[{PYTHON}, ping()]"),
    _tools("pythonic", " [f(a=[1, (2.5, None)], b={'k': \"\"\"x'\"\"\"})]", (("f", {"a": [1, [2.5, None]], "b": {"k": "x'"}}),)),
    _tools("pythonic", r"[f(a='\x41\u00e9\q\'')]", (("f", {"a": "Aé\\q'"}),)),
    _tools("llama4_pythonic", f"<|python_start|>[{PYTHON}, ping()]<|python_end|>"),
    _tools("mistral", f"[TOOL_CALLS]get_weather{CITY_JSON}[TOOL_CALLS]ping{{}}"),
    _tools("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]call00001[ARGS]{CITY_JSON}[TOOL_CALLS]ping[ARGS]{{}}"),
    _tools("mistral", f"[TOOL_CALLS] {PARALLEL}"),
    _tools("qwen3_coder", CODER_CALLS),
    _tools("qwen3_coder", "On it.\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", (("f", {"a": 1}),), content="On it.\n</tool_call>"),
    _tools("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>", (("f", {"a": 1}),)),
    _tools("qwen3_coder", "<tool_call><function=f><parameter=a>\n1\n</para", (("f", {"a": "1\n</para"}),)),
    _tools("qwen3_coder", "<tool_call><function=get_weather><parameter=tags>\n['a', \"b\"]\n</parameter><parameter=note>12</parameter></function></tool_call>", (("get_weather", {"tags": ["a", "b"], "note": "12"}),)),
    _tools("qwen3_coder", "<tool_call><function=get_weather><parameter=note>null</parameter><parameter=days>soon</parameter></function></tool_call>", (("get_weather", {"note": None, "days": "soon"}),)),
    _tools("deepseek_v3", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{CITY_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    _tools("deepseek_v31", f"Fine.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY_JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", content="Fine."),
    _tools("deepseek_v32", '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">San "F"\nX</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n<｜DSML｜parameter name="metric" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
    _tools("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', (("ping", {}),)),
    _tools("kimi_k2", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{CITY_JSON}<|tool_call_end|><|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>"),
    _tools("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>San "F"\nX<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|open|>argument key="metric" type="boolean"<|sep|>true<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="ping" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'),
    _tools("glm45", GLM_CALLS),
    _tools("glm47", GLM_CALLS.replace("\n<", "<")),
    _tools("hy_v3", '<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>San "F"\nX</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n<arg_key:opensource>metric</arg_key:opensource>\n<arg_value:opensource>true</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>ping<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>'),
    _tools("minimax_m2", '\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">San "F"\nX</parameter>\n<parameter name="days">3</parameter>\n<parameter name="metric">true</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>'),
    _tools("seed_oss", '<seed:tool_call>\n<function=get_weather>\n<parameter=city>San "F"\nX</parameter>\n<parameter=days>3</parameter>\n<parameter=metric>True</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>'),
    _tools("step3", '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather"><steptml:parameter name="city">San "F"\nX</steptml:parameter><steptml:parameter name="days">3</steptml:parameter><steptml:parameter name="metric">true</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="ping"></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>'),
    _tools("granite", f"<|tool_call|> {PARALLEL}"),
    _tools("granite4", HERMES_CALLS),
    _tools("granite-20b-fc", f'<function_call> {{"name": "get_weather", "arguments": {CITY_JSON}}}\n<function_call> {{"name": "ping", "arguments": {{}}}}'),
    _tools("jamba", f"<tool_calls>{PARALLEL}</tool_calls>"),
    _tools("minimax", f'<tool_calls>\n{{"name": "get_weather", "arguments": {CITY_JSON}}}\n{{"name": "ping", "arguments": {{}}}}\n</tool_calls>'),
    _tools("internlm", f'Sure.<|action_start|><|plugin|>{{"name": "get_weather", "parameters": {CITY_JSON}}}<|action_end|>', TWO[:1], content="Sure."),
    _tools("cohere_command3", f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {CITY_JSON}}},\n    {{"tool_call_id": "1", "tool_name": "ping", "parameters": {{}}}}\n]<|END_ACTION|>'),
    _tools("apertus", f'<|tools_prefix|>[{{"get_weather": {CITY_JSON}}}, {{"ping": {{}}}}]<|tools_suffix|>'),
    _tools("lfm2", f"<|tool_call_start|>[{PYTHON}, ping()]<|tool_call_end|>"),
    _tools("olmo3", f"<function_calls>\n{PYTHON}\nping()\n</function_calls>"),
    _tools("longcat", f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {CITY_JSON}}}\n</longcat_tool_call>\n<longcat_tool_call>\n{{"name": "ping"}}\n</longcat_tool_call>'),
    _tools("phi4_mini_json", f"functools{PARALLEL}"),
    _tools("xlam", PARALLEL),
    _tools("xlam", f"Here:\n```json\n{PARALLEL}\n```", content="Here:"),
    _tools("gemma4", '<|tool_call>call:get_weather{city:<|"|>San "F"\nX<|"|>,days:3,metric:true}<tool_call|><|tool_call>call:ping{}<tool_call|>'),
    _tools("functiongemma", '<start_function_call>call:get_weather{city:<escape>San "F"\nX<escape>,days:3,metric:true}<end_function_call><start_function_call>call:ping{}<end_function_call>'),
    _tools("functionary", f"<function=get_weather>{CITY_JSON}</function><function=ping>{{}}</function>"),
    _tools("solar", f"<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>get_weather<|tool_call:args|>{CITY_JSON}<|tool_call:end|><|tool_call:begin|>2<|tool_call:name|>ping<|tool_call:args|>{{}}<|tool_call:end|>"),
    _tools("openai", f"<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY_JSON}<|call|>", TWO[:1], reasoning="why", content="Looking."),
    _tools("openai", f" to=functions.get_weather<|channel|>commentary json<|message|>{CITY_JSON}<|call|>", TWO[:1]),
    # What models write besides what their templates show.
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "thought": {"x": [1]}}</tool_call>', (("f", {"a": 1}),)),
    _tools("hermes", '<tool_call>{"thought": "a", "name": "f", "arguments": {"a": 1}}}</tool_call>\nB', (("f", {"a": 1}),), content="B"),
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>B', (("f", {"a": 1}),), content="B"),
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n', (("f", {"a": 1}),)),
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\u00e9\\ud83d\\ude00"}}</tool_call>', (("f", {"a": "</tool_call>é😀"}),)),
    _tools("llama3_json", 'Sure: {"name": "ping", "parameters": {}}\nDone', (("ping", {}),), content="Sure:\nDone"),
    _tools("granite", f"<tool_call> {PARALLEL}"),
    _tools("granite", PARALLEL),
    _tools("phi4_mini_json", f"<|tool_call|>{PARALLEL}<|/tool_call|>"),
    _tools("kimi_k2", "<|tool_call_section_begin|><|tool_call_begin|>functions.ping<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>", TWO[1:]),
    _tools("glm45", "<tool_call>visit<arg_key>first name</arg_key><arg_value>a\n</arg_value><arg_key>day</arg_key><arg_value>1</arg_value><arg_key>size</arg_key><arg_value>3.0</arg_value></tool_call>", (("visit", {"first name": "a\n", "day": "1", "size": 3.0}),)),
    _tools("glm45", "<tool_call>visit<arg_key>first name</arg_key><arg_value>\n\na\n\n</arg_value></tool_call>", (("visit", {"first name": "\na\n"}),)),
    _tools("minimax_m2", "<minimax:tool_call><invoke name=visit><parameter name='first name'>a</parameter></invoke></minimax:tool_call>", (("visit", {"first name": "a"}),)),
    _tools("openai", "<|channel|>commentary to=functions.ping <|constrain|>json<|message|><|call|>", (("ping", {}),)),
    _tools("openai", "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>", (("ping", {}),)),
]  # fmt: skip

# Nothing is lost, nothing is invented.
BROKEN = [
    _tools("hermes", text, (), content=text)
    for text in (
        '<tool_call>{"name": "nobody", "arguments": {"a": 1}}</tool_call>',
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": Oslo}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "why": 1}</tool_call>',
        '<tool_call>{"name": "f"',
        "<tool_call>",
        "a < b and <tool_c",
        "",
    )
] + [
    # Its client knows of the call already: it gets the rest as the model wrote it.
    _tools("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call>', (("f", '{"a": 1, b: 2}}'),)),
    _tools("hermes", '<tool_call>{"name": "nobody"}</tool_call>\n<tool_call>{"name": "ping"}</tool_call>', (("ping", {}),), content='<tool_call>{"name": "nobody"}</tool_call>'),
    _tools("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "x": }] B', (("f", {"a": 1}),), content="}] B"),
    _tools("llama3_json", 'So: {"name": "Ann", "age": 3}', (), content='So: {"name": "Ann", "age": 3}'),
    _tools("mistral", "[TOOL_CALLS]nobody[ARGS]{}", (), content="[TOOL_CALLS]nobody[ARGS]{}"),
    _tools("llama3_json", '{"answer": 42}', (), content='{"answer": 42}'),
    _tools("pythonic", "[1] says so", (), content="[1] says so"),
    _tools("pythonic", "[f(a=1", (), content="[f(a=1"),
    _tools("pythonic", "[f(a=1), g(b=2)]", (("f", {"a": 1}),), content=", g(b=2)]"),
    _tools("glm45", "<tool_call>nobody<arg_key>", (), content="<tool_call>nobody<arg_key>"),
    _tools("phi4_mini_json", "import functools, os", (), content="import functools, os"),
    _tools("openai", "plain <|channel|>", (), content="plain <|channel|>"),
    _tools("openai", '<|channel|>commentary to=functions.nobody<|message|>{"a": 1}<|call|>', (), content='<|channel|>commentary to=functions.nobody<|message|>{"a": 1}'),
]  # fmt: skip

THINKING = [
    Case("<think>\nwhy\n</think>\n\nanswer", "answer", "why", thinks="qwen3"),
    Case("why</think>answer", "answer", "why", thinks="qwen3"),
    Case("\nwhy\n</think>\n\nanswer", "answer", "why", thinks="glm45", prompt="<|assistant|><think>\n"),
    Case("answer </think> x", "answer </think> x", thinks="glm45", prompt="<|assistant|>"),
    Case("answer", "answer", thinks="qwen3", prompt="<think>\n\n</think>\n\n"),
    Case(" answer ", " answer ", thinks="glm45"),
    Case("why is <think> there?</think>", "", "why is <think> there?", thinks="deepseek_r1"),
    Case("wh</thi", "", "wh", thinks="deepseek_r1", reason="length"),
    Case("wh</thi", "", "wh</thi", thinks="deepseek_r1"),
    Case("Here's my thought process: a\nHere's my response: b", "b", "a", thinks="granite"),
    Case("<think>\nwhy\n</think>\n<answer>\nanswer\n</answer>", "answer", "why", thinks="hunyuan_a13b"),
    Case(f"why</think>{HERMES_CALLS}", "", "why", TWO, tools="hermes", thinks="qwen3"),
    Case(f"why {HERMES_CALLS}", "", f"why {HERMES_CALLS}", tools="hermes", thinks="qwen3"),
    Case("<think>why<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "", "why", TWO[1:], tools="kimi_k2", thinks="kimi_k2"),
    Case(f"[THINK]why[/THINK]Well.[TOOL_CALLS]get_weather[ARGS]{CITY_JSON}", "Well.", "why", TWO[:1], tools="mistral", thinks="mistral"),
    Case("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c ", "c ", "a\nb", thinks="openai_gptoss"),
    Case("<|channel|>analysis<|mess", "", "", thinks="openai_gptoss", reason="length"),
    Case("<|channel|>analysis to=browser.open code<|message|>{}<|call|>", "", "{}", thinks="openai_gptoss"),
    Case("Here", "Here", thinks="granite"),
    Case("Well <|cha", "Well ", thinks="openai_gptoss", reason="length"),
]  # fmt: skip
