"""Makes tokenizers.json and templates.json beside this file.

The references are Python's: `tokenizers` and `sentencepiece` for ids, `jinja2` set up
as `transformers.utils.chat_template_utils` does for templates. Run once:

    pip install jinja2 tokenizers sentencepiece
    python make_golden.py
"""

import datetime
import io
import json
import pathlib
import random

import jinja2
import jinja2.ext
import jinja2.sandbox
import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't you think it's well said?",
    "Hello world again and again, 1234567 times; the answer is 42, we've seen 2024.",
    "def main():\n    for index in range(10):\n        print('hello', index)\n",
    "Grüße aus München, señor! Œuvre complète – déjà vu.",
    "안녕하세요 세계 값이 있다. مرحبا بالعالم. 你好世界，这是一个测试。こんにちは",
    "https://example.org/path?query=1&other=two  three   four\t\ttabs\r\n\r\nend",
    "user assistant system tool the of and to in is you that it he was for on are",
] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]

TEXTS = [
    "Grüße, señor! Œuvre – 45 🙃",
    "    ",
    "\t\ttabs\tand  two",
    "line\r\nline\r\n\r\n  indented",
    "1234567",
    "안녕하세요, 값 123",
    "مرحبا بالعالم ١٢٣",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<think>so it is</think> done",
    "don't DON'T we'LL I'm they've",
    "w" * 50,
    " leading and trailing ",
    "",
    "A🙂B 👩‍💻 é é",
    "x ,y .z",
    "a    b",
    "\n  indented",
    "HTMLParser camelCase snake_case SCREAMING/CASE//\n",
    "  \u3000 wide blanks\u00a0and non-breaking",
    "你好世界，这是一个测试。123abc",
    "ſ's 'ſ",
    "a\n\nb\n \nc   \n\n  d",
    "½ ² ⅷ ೨",
]


def fuzz_texts(count=60):
    rng = random.Random(7)
    pool = list("aAbzZé値한🙂 \t\n\r'.,!?1٣½_/-$<>|") + ["  ", "the", "'s", "'LL", "\r\n", "́", " "]
    return ["".join(rng.choice(pool) for _ in range(rng.randint(1, 24))) for _ in range(count)]


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]


def splits(*patterns):
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRES = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, None),
    "smollm": (
        pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]), False, None),
    "llama-bpe": (splits(LLAMA3), True, None),
    "qwen2": (splits(QWEN2), False, normalizers.NFC()),
    "tekken": (splits(TEKKEN), True, None),
    "gpt-4o": (splits(O200K), False, None),
    "deepseek-v3": (splits(*DEEPSEEK3), False, None),
}


def cases(encode, texts):
    return [[text, encode(text)] for text in texts]


def byte_level():
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(m) for m in model["merges"]]
    # A whole word that no merge makes, so that "whole words first" shows.
    vocab["Ġbrownfox"] = len(vocab)
    tokens = sorted(vocab, key=vocab.get)
    kinds = ["control" if t in SPECIALS else "normal" for t in tokens]
    tokens += USER_DEFINED
    kinds += ["user_defined"] * len(USER_DEFINED)
    rules = []
    for name, (pre, ignore_merges, normalizer) in PRES.items():
        hf = tokenizers.Tokenizer(models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=ignore_merges))
        hf.pre_tokenizer = pre
        hf.decoder = decoders.ByteLevel()
        if normalizer:
            hf.normalizer = normalizer
        hf.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIALS])
        hf.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in USER_DEFINED])
        texts = TEXTS + ["the brownfox", " brownfox"] + fuzz_texts()
        rules.append({
            "pre": name,
            "pre_tokenizer": json.loads(hf.to_str())["pre_tokenizer"],
            "normalizer": json.loads(hf.to_str())["normalizer"],
            "ignore_merges": ignore_merges,
            "cases": cases(lambda t: hf.encode(t, add_special_tokens=False).ids, texts),
        })
    json_file = json.loads(hf.to_str())
    return {
        "tokens": [[t, 0, k] for t, k in zip(tokens, kinds)],
        "merges": [" ".join(m) for m in merges],
        "added_tokens": json_file["added_tokens"],
        "rules": rules,
    }


def sentence_piece(prefix):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, model_type="bpe", vocab_size=700,
        byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
        normalization_rule_name="identity", character_coverage=0.98, minloglevel=2,
        user_defined_symbols=[] if prefix else ["<think>", "\n\n", "▁▁"], bos_id=1, eos_id=2, unk_id=0)
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    tokens = []
    for i in range(sp.get_piece_size()):
        kind = "unknown" if sp.is_unknown(i) else "control" if sp.is_control(i) else "byte" if sp.is_byte(i) else "normal"
        piece = sp.id_to_piece(i)
        if piece in ("<think>", "\n\n", "▁▁") and not prefix:
            kind, piece = "user_defined", piece.replace("▁", " ")
        tokens.append([piece, sp.get_score(i), kind])
    texts = [t for t in TEXTS if "<|" not in t and (not prefix or "<think>" not in t)] + fuzz_texts()
    if prefix:
        texts = [t for t in texts if "▁" not in t]
    return {"add_space_prefix": prefix, "tokens": tokens, "cases": cases(sp.encode, texts)}


# --- chat templates -----------------------------------------------------------------

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
CHATML_BLOCKS = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}
    {%- endif %}
    {% if message.role == 'assistant' %}
    {{ '<|im_start|>' + message.role + '\\n' + message.content.strip() + '<|im_end|>' }}
    {% else %}
    {{ '<|im_start|>%s' | format(message.role) }}
{{ message.content | trim }}<|im_end|>
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3_CHAT = """{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Use the following functions\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
INST_SYS = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
QWEN_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in message.content %}
                {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LOOP_CONTROLS = """{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ message.role | upper }}: {{ message.content.split() | join(' ') }}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% if messages[0].role == 'system' %}
{{ messages[0].content }}
{% endif %}"""
GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}
{{ '<|assistant|>' }}{%- generation -%}
 {{ m.content }}{{ eos_token }}
{%- endgeneration %}
{% else %}
{{ '<|' ~ m.role ~ '|>' }}
{{ m.content }}
{% endif %}
{% endfor %}"""
VALUES = """{{ none }} {{ true }} {{ false }} {{ 1.0 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ [1, 'a', none, true] }} {{ {'k': 'v', 'n': 1.5} }} {{ undefined_name }} {{ messages | length }}
{{ {'b': 1, 'a': [1.0, 1e-7, none, true, "é<&>'\\"\\u001f"]} | tojson }}
{{ {'b': 1, 'a': []} | tojson(sort_keys=true) }} {{ [] | tojson(indent=2) }} {{ {'x': {}} | tojson(indent=2) }}
{{ {'b': [1, 2]} | tojson(separators=(',', ':')) }} {{ 'é' | tojson(ensure_ascii=true) }}
{% for key, value in {'one': 1, 'two': 2}.items() %}{{ key }}={{ value }}{{ ', ' if not loop.last }}{% endfor %}

{{ messages[0].get('absent', 'fallback') }} {{ 'a-b-c'.split('-')[1] }} {{ '  x '.strip() }}|{{ 'xxaxx'.lstrip('x') }}|{{ 'Title case'.title() }}|{{ 'abc'.replace('b', 'B') }}|{{ 'abc'[::-1] }}|{{ 'abc'[-1] }}
{% for message in messages %}{{ message.content }}{% endfor %}"""
DICT_MACRO = """{% macro turn(role, text) -%}
<{{ role }}>
{{ text }}
</{{ role }}>
{% endmacro %}
{%- set names = {'user': 'HUMAN', 'assistant': 'AI'} %}
{%- for message in messages %}
{{- turn(names.get(message.role, message.role), message.content) }}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'assistant' %}<AI>{% endif %}"""

TEMPLATES = {
    "chatml": CHATML, "chatml_blocks": CHATML_BLOCKS, "llama3": LLAMA3_CHAT, "inst": INST, "inst_sys": INST_SYS,
    "gemma": GEMMA, "qwen_tools": QWEN_TOOLS, "loop_controls": LOOP_CONTROLS, "generation": GENERATION,
    "values": VALUES, "dict_macro": DICT_MACRO,
    "strftime": "{{ strftime_now('%A %-d %B %Y, %H:%M') }} {{ strftime_now('%Y-%m-%d') }}\n\n{% for m in messages %}{{ m.content }}{% endfor %}\n",
}
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Weather at a place; use when a < b & c > d",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Städte, 'quoted'"}, "days": {"type": "integer"}}, "required": ["place"]},
    },
}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "<Zürich & Köln>", "days": 2, "exact": True, "unit": None}}}
CONVERSATIONS = {
    "u": [{"role": "user", "content": "Hello there"}],
    "su": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}],
    "uau": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Three!"}],
    "blanks": [{"role": "user", "content": "  \n padded text \n\n"}, {"role": "assistant", "content": "\n\n answer  "}, {"role": "user", "content": "x"}],
    "non_ascii": [{"role": "user", "content": "Grüße 안녕 🙂 — <b>&amp;</b>"}],
    "think": [{"role": "user", "content": "a1"}, {"role": "assistant", "content": "<think>\nhidden\n</think>\n\nshown"}, {"role": "user", "content": "b2"}],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "{\"sky\": \"grey\"}", "tool_call_id": "call00001", "name": "get_weather"},
    ],
    "last_assistant": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two,"}],
    "uu": [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}],
    "a": [{"role": "assistant", "content": "alone"}],
    "developer": [{"role": "developer", "content": "rules"}, {"role": "user", "content": "go"}],
    "foo": [{"role": "foo", "content": "bar"}],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = 1_753_776_000


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(lineno)

    def _same(self, caller):
        return caller()


class Raised(Exception):
    pass


def environment():
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise Raised(message)

    def strftime_now(fmt):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None).strftime(fmt)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def templates():
    env = environment()
    found = []
    for name, source in TEMPLATES.items():
        compiled = env.from_string(source)
        for conversation, messages in CONVERSATIONS.items():
            for prompt in (True, False):
                for tools in ((None, TOOLS) if conversation in ("tool", "su") and name in ("llama3", "qwen_tools") else (None,)):
                    case = {"template": name, "conversation": conversation, "add_generation_prompt": prompt, "tools": tools is not None}
                    try:
                        case["text"] = compiled.render(
                            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **TOKENS)
                    except Raised as error:
                        case["raises"] = str(error)
                    except Exception as error:
                        case["fails"] = type(error).__name__
                    found.append(case)
    return {
        "templates": TEMPLATES, "conversations": CONVERSATIONS, "tools": TOOLS, "tokens": TOKENS, "now": NOW, "cases": found,
    }


def write(name, value):
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write("tokenizers.json", {"byte_level": byte_level(), "sentence_piece": [sentence_piece(True), sentence_piece(False)]})
    write("templates.json", templates())
