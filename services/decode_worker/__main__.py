"""python -m services.decode_worker."""

from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from libs.worker.worker import Worker
from services.decode_worker.settings import DecodeWorkerSettings

if __name__ == "__main__":
    run_service(ServiceKind.DECODE_WORKER, DecodeWorkerSettings, Worker)
