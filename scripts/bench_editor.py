"""Milliseconds from a key press in an editor to the mistakes that `stagerun lsp` answers with, and the server's processor time for each.

scripts/bench editor [DIR] [PRESSES]    DIR: solvers/resnet50_72ep
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "process"))

from test_lsp_server import Editor


def seconds(pid: int) -> float:
    """User and system time of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100


async def measure(folder: Path, presses: int) -> None:
    editor = Editor(folder)
    await editor.start()
    name = "schedule.prototxt"
    text = editor.open(name)
    wrong = text.replace("stage {", "stage { x", 1)
    waited = []
    server = editor.client._server.pid
    for press in range(presses + 5):
        if press == 5:
            began = seconds(server)
        editor.diagnostics.clear()
        start = time.perf_counter()
        editor.type(name, text if press % 2 else wrong)
        await editor.until(lambda: name in editor.diagnostics)
        waited.append(1000 * (time.perf_counter() - start))
    used = 1000 * (seconds(server) - began) / presses
    waited = sorted(waited[5:])
    p95 = waited[int(0.95 * len(waited))]
    print(
        f"{folder.name}: median {statistics.median(waited):.0f} ms, 95 % within {p95:.0f} ms, {used:.0f} ms of processor time"
    )
    await editor.client.shutdown_async(None)
    editor.client.exit(None)
    await editor.client.stop()


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "solvers/resnet50_72ep").resolve()
    asyncio.run(measure(place, int(sys.argv[2]) if len(sys.argv) > 2 else 200))
