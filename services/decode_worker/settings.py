"""Settings of the decode worker: those of every worker, with another default."""

from libs.worker.settings import RoleSetting, WorkerSettings


class DecodeWorkerSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker that starts as one that generates with KV that is handed over."""

    role: RoleSetting = "decode"
