"""The reference: Jinja2 and `tokenizers`, as `transformers` sets them up.

Reads one JSON request a line from standard input and writes one JSON answer a line:

    {"source": …, "variables": {…}, "now": unix, "continues": bool}
                                                   -> {"text": …} or {"error": …}
    {"names": true}                                -> what Jinja2 and Python's types have
    {"encode_with": path, "texts": […]}            -> {"ids": [[…], …]}
    {"vocabulary": path}                           -> the tokenizer's keys of a GGUF file
"""

import datetime
import json
import sys

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}` gives its body; transformers notes where it stands."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


ENVIRONMENT = environment()
TEMPLATES = {}


def render(request):
    now = datetime.datetime.fromtimestamp(request.get("now", 0), datetime.timezone.utc)
    now = now.replace(tzinfo=None)
    ENVIRONMENT.globals["strftime_now"] = now.strftime
    try:
        source = request["source"]
        if source not in TEMPLATES:
            TEMPLATES[source] = ENVIRONMENT.from_string(source)
        variables = request.get("variables", {})
        try:
            text = TEMPLATES[source].render(**variables)
        except TypeError:
            # A template that joins strings takes the arguments as text.
            if not with_text_arguments(variables.get("messages") or []):
                raise
            text = TEMPLATES[source].render(**variables)
        if request.get("continues"):
            text = cut(text, variables["messages"][-1]["content"])
        # What is no Unicode text cannot be compared.
        text.encode()
        return {"text": text}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def with_text_arguments(messages):
    """Whether there were arguments to write as text."""
    changed = False
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            if isinstance(function["arguments"], dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                changed = True
    return changed


def cut(text, last):
    """`continue_final_message`: the prompt ends where the last message ends."""
    stripped = last.strip()
    start = text.rindex(stripped)
    kept = last.lstrip()
    if text[start : start + len(kept)] != kept:
        kept = stripped
    return text[: start + len(kept)]


def names():
    def public(of):
        return sorted(name for name in dir(of) if not name.startswith("_"))

    return {
        "filters": sorted(ENVIRONMENT.filters),
        "tests": sorted(ENVIRONMENT.tests),
        "globals": sorted(jinja2.defaults.DEFAULT_NAMESPACE),
        "str": public(str),
        "list": public(list),
        "tuple": public(tuple),
        "dict": public(dict),
        "int": public(int),
        "float": public(float),
        "range": public(range),
    }


def encode(request):
    import tokenizers
    import vocabulary

    path = request["encode_with"]
    if path.endswith(".json"):
        tokenizer = tokenizers.Tokenizer.from_file(path)
    else:
        tokenizer = vocabulary.made(path)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in request["texts"]]
    return {"ids": [one.ids for one in encoded]}


def keys_of(request):
    import vocabulary

    return vocabulary.metadata(request["vocabulary"])


def answer(request):
    if "names" in request:
        return names()
    if "encode_with" in request:
        return encode(request)
    if "vocabulary" in request:
        return keys_of(request)
    return render(request)


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
