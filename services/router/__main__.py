"""python -m services.router."""

from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from services.router.service import RouterService
from services.router.settings import RouterSettings

if __name__ == "__main__":
    run_service(ServiceKind.ROUTER, RouterSettings, RouterService)
