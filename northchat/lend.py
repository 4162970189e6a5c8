"""`northchat --serve` beside front ends: their engine gets an endpoint for as long as this process lives."""

import asyncio
import sys
from contextlib import aclosing

from northchat.client import Client, ClientError, Endpoint


def run(engine: Endpoint, model: str, host: str, port: int, api_key: str | None) -> int | None:
    """The exit code; None when the engine died, and whoever called should take its place."""
    try:
        return asyncio.run(_hold(engine, model, host, port, api_key))
    except KeyboardInterrupt:
        return 0


async def _hold(engine: Endpoint, model: str, host: str, port: int, api_key: str | None) -> int | None:
    client = Client(engine)
    is_open = False
    try:
        async with aclosing(client.lend(host, port, api_key)) as states:
            async for health in states:
                if not is_open:
                    is_open = True
                    line = f"Serving {model} on http://{host}:{port}/v1, by the engine that runs already"
                    print(f"{line} (Ctrl-C ends it)", file=sys.stderr)
                if health.status == "failed":
                    print(f"northchat: {health.message}", file=sys.stderr)
                    return 1
    except ClientError as error:
        if error.code in ("connection_lost", "unreachable"):
            return None
        print(f"northchat: {error.message}", file=sys.stderr)
        return 1
    finally:
        await client.aclose()
    print("northchat: the engine was stopped", file=sys.stderr)
    return 0
