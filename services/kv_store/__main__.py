"""python -m services.kv_store."""

from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from services.kv_store.service import KvStoreService
from services.kv_store.settings import KvStoreSettings

if __name__ == "__main__":
    run_service(ServiceKind.KV_STORE, KvStoreSettings, KvStoreService)
