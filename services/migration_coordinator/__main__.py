"""python -m services.migration_coordinator."""

from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from services.migration_coordinator.service import CoordinatorService
from services.migration_coordinator.settings import CoordinatorSettings

if __name__ == "__main__":
    run_service(ServiceKind.MIGRATION_COORDINATOR, CoordinatorSettings, CoordinatorService)
