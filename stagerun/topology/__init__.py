"""The processors of one machine, and which of them each worker gets. Nothing here moves a process: `stagerun.binding` does."""
