"""A small load: streams of random lengths, some left early, all of them counted."""

import asyncio
import os
import random

import aiohttp

URL = os.environ["SERVER"]
REQUESTS, AT_ONCE = 200, 16


async def one(session, number, left):
    chance = random.Random(number)
    length = chance.randint(1, 64)
    leaves = number % 5 == 0
    body = {
        "prompt": "Lily went to the park. " * chance.randint(1, 40),
        "max_tokens": length, "ignore_eos": True, "seed": number, "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with left, session.post(f"{URL}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        lines = [line async for line in first_lines(reply, 1 if leaves else None)]
    if not leaves:
        assert lines[-1] == b"data: [DONE]", lines[-1]
        assert b'"completion_tokens":%d,' % length in lines[-2], lines[-2]


async def first_lines(reply, most):
    async for line in reply.content:
        if line.strip():
            yield line.strip()
            if most is not None and (most := most - 1) <= 0:
                return


async def main():
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        left = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(one(session, number, left) for number in range(REQUESTS)))
        for _ in range(500):
            async with session.get(f"{URL}/load") as reply:
                load = await reply.json()
            if all(load[name] == 0 for name in ("running", "waiting", "swapped", "answers")):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"something is left: {load}")


asyncio.run(main())
