"""python -m services.prefill_worker."""

from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from libs.worker.worker import Worker
from services.prefill_worker.settings import PrefillWorkerSettings

if __name__ == "__main__":
    run_service(ServiceKind.PREFILL_WORKER, PrefillWorkerSettings, Worker)
