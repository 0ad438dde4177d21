"""A consumer as a process of its own, to be killed and frozen: `python -m tests.chaos.applier HISTORY_FILE ...`.

For each task it writes a line, an effect outside of Kafka, and produces a record, an effect inside.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.config import load_settings
from pipeline.consumer import DueTaskConsumer
from tests.chaos.history import HistoryFile

if TYPE_CHECKING:
    from pipeline.core.effects import DueTask
    from pipeline.service.consumer.task_handling import TaskContext

GROUP: Final = "billing"
BATCH_MAX: Final = 20


def main() -> None:
    """Apply due tasks until SIGTERM."""
    parser = argparse.ArgumentParser(description="One consumer of a chaos run.")
    parser.add_argument("history", type=Path, help="its history file")
    parser.add_argument("--outputs", required=True, help="topic that gets a record for each task")
    options = parser.parse_args()
    history = HistoryFile(options.history)

    def apply(task: DueTask, context: TaskContext) -> None:
        history.applying(task)
        context.produce(options.outputs, task.task_id.encode(), task.emission_id.encode())

    consumer = DueTaskConsumer(GROUP, apply, settings=load_settings(), batch_max=BATCH_MAX)
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    consumer.run()


if __name__ == "__main__":
    main()
