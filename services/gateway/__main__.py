"""python -m services.gateway."""

from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings

if __name__ == "__main__":
    run_service(ServiceKind.GATEWAY, GatewaySettings, GatewayService, serves_probes=False)
