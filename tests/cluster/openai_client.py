"""Drives a cluster with the official `openai` client, unmodified.

Usage: openai_client.py texts|shapes, with OPENAI_BASE_URL and OPENAI_API_KEY set.
`texts` runs on the chain-bytes fixture, whose answers are known; `shapes` on rand.
"""

import asyncio
import sys

import openai
from openai import AsyncOpenAI, OpenAI

client = OpenAI(max_retries=0, timeout=60)


def chat(content, **more):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="test", messages=messages, **more)


def complete(prompt, **more):
    return client.completions.create(model="test", prompt=prompt, **more)


def joined_chat(stream, choices=1):
    """Texts, finish reasons and usage of a chat stream."""
    texts, finishes, usage = [""] * choices, [None] * choices, None
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk", chunk
        if chunk.usage is not None:
            assert chunk.choices == [], chunk
            usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                assert finishes[choice.index] is None, chunk
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, usage


def joined_completion(stream, choices=1):
    texts, finishes, usage = [""] * choices, [None] * choices, None
    for chunk in stream:
        assert chunk.object == "text_completion", chunk
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    return texts, finishes, usage


def raises(kind, code, call):
    try:
        call()
    except kind as error:
        assert error.code == code, (error.code, code)
        assert error.message and error.body["message"], error
        return error
    raise AssertionError(f"no {kind.__name__}")


def texts():
    right = {
        "0": "🙂값é👩‍💻A",
        "1": "A🙂B",
        "2": "🙃🎉",
        "3": "mondaytuesday!",
        "4": "안녕!",
    }
    for start, text in right.items():
        answer = chat(start, temperature=0)
        assert answer.choices[0].message.content == text, answer
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        got = joined_chat(chat(start, temperature=0, stream=True))
        assert got == ([text], ["stop"], None), got
        answer = complete(start, temperature=0)
        assert answer.choices[0].text == text, answer
        got = joined_completion(complete(start, temperature=0, stream=True))
        assert got == ([text], ["stop"], None), got

    options = {"include_usage": True}
    whole = chat("3", temperature=0, n=2, stop=["daytues"])
    got = joined_chat(
        chat("3", temperature=0, n=2, stop=["daytues"], stream=True, stream_options=options), 2
    )
    assert got[0] == ["mon", "mon"] and got[1] == ["stop", "stop"], got
    assert [choice.message.content for choice in whole.choices] == got[0]
    assert got[2] == whole.usage, (got[2], whole.usage)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    several = complete(["3", "1"], temperature=0)
    assert [choice.text for choice in several.choices] == [right["3"], right["1"]]

    # The helper that puts a stream together itself.
    with client.chat.completions.stream(
        model="test", messages=[{"role": "user", "content": "0"}], temperature=0
    ) as stream:
        for event in stream:
            assert event.type in ("chunk", "content.delta", "content.done"), event
        final = stream.get_final_completion()
    assert final.choices[0].message.content == right["0"], final

    async def beside():
        async with AsyncOpenAI(max_retries=0, timeout=60) as many:
            calls = [
                many.completions.create(model="test", prompt=start, temperature=0)
                for start in right
            ]
            answers = await asyncio.gather(*calls)
            assert [a.choices[0].text for a in answers] == list(right.values())
            stream = await many.chat.completions.create(
                model="test",
                messages=[{"role": "user", "content": "3"}],
                temperature=0,
                stream=True,
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            assert text == right["3"], text

    asyncio.run(beside())


def shapes():
    listed = client.models.list()
    assert [model.id for model in listed] == ["test"], listed
    assert client.models.retrieve("test").object == "model"

    answer = chat("hi", max_tokens=6, seed=3, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert isinstance(entry.token, str) and entry.logprob <= 0 and entry.bytes is not None
        assert len(entry.top_logprobs) == 2
    again = chat("hi", max_tokens=6, seed=3, logprobs=True, top_logprobs=2)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.choices[0].logprobs == answer.choices[0].logprobs

    answer = complete([40, 41, 42], max_tokens=5, logprobs=3, extra_body={"ignore_eos": True})
    logprobs = answer.choices[0].logprobs
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert [len(one) for one in lists] == [5, 5, 5, 5], logprobs
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 5

    many = complete([40, 41, 42], max_tokens=5, n=3, seed=1, temperature=1.2)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    streamed, finishes, usage = joined_completion(
        complete(
            [40, 41, 42], max_tokens=5, n=3, seed=1, temperature=1.2,
            stream=True, stream_options={"include_usage": True},
        ),
        3,
    )
    assert streamed == [choice.text for choice in many.choices], (streamed, many)
    assert finishes == [choice.finish_reason for choice in many.choices]
    assert usage.completion_tokens == many.usage.completion_tokens

    prompt = list(range(50, 110))
    first = complete(prompt, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens == 0, first.usage
    second = complete(prompt, max_tokens=2)
    assert second.usage.prompt_tokens_details.cached_tokens == 48, second.usage

    raw = client.chat.completions.with_raw_response.create(
        model="test",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        extra_headers={"X-Request-Id": "from-python"},
    )
    assert raw.headers["x-request-id"].startswith("from-python-"), raw.headers
    assert raw.parse()._request_id == raw.headers["x-request-id"]

    unknown = lambda **more: client.chat.completions.create(
        model="nope", messages=[{"role": "user", "content": "hi"}], **more
    )
    raises(openai.NotFoundError, "model_not_found", unknown)
    raises(openai.NotFoundError, "model_not_found", lambda: unknown(stream=True))
    raises(openai.NotFoundError, "model_not_found", lambda: client.models.retrieve("nope"))
    error = raises(openai.BadRequestError, "invalid_argument", lambda: chat("hi", n=0))
    assert error.param == "n" and error.type == "invalid_request_error", error
    raises(openai.BadRequestError, "invalid_argument", lambda: chat("hi", n=0, stream=True))
    raises(
        openai.BadRequestError,
        "context_length_exceeded",
        lambda: complete([9] * 5000, max_tokens=1),
    )
    error = raises(
        openai.BadRequestError,
        "unsupported",
        lambda: chat("hi", response_format={"type": "json_object"}),
    )
    assert error.param == "response_format"
    stranger = OpenAI(api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, "api_key_invalid", stranger.models.list)

    # Leaving a stream early ends the work behind it; the caller checks that.
    stream = complete([40, 41], max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    for index, _ in enumerate(stream):
        if index == 3:
            break
    stream.close()


{"texts": texts, "shapes": shapes}[sys.argv[1]]()
print("all passed")
