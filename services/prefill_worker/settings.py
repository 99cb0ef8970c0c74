"""Settings of the prefill worker: those of every worker, with another default."""

from libs.worker.settings import RoleSetting, WorkerSettings


class PrefillWorkerSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker that starts as one that runs prompts and hands their KV over."""

    role: RoleSetting = "prefill"
