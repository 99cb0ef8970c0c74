"""Everything a worker needs to use the KV stores, made together."""

from prometheus_client import Counter

from libs.engine.engine import Engine
from libs.model.model import Model
from libs.runtime.runtime import Runtime
from libs.transport.port import Transport
from libs.worker.settings import WorkerSettings
from libs.worker.startup import block_shape_of
from libs.worker.stores.kv_uploads import KvUploads
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.prefixes import Prefixes
from libs.worker.stores.stores import Stores


class StoreAccess:
    """The stores, prefixes from them, puts to them."""

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        settings: WorkerSettings,
        model: Model,
        engine: Engine,
        transfer_bytes: Counter,
    ) -> None:
        metrics = StoreMetrics(runtime.registry, transfer_bytes)
        self.stores = Stores(
            runtime.bus,
            transport,
            runtime.spawn,
            metrics,
            settings,
            block_shape_of(model, settings.block_size),
            model.config.num_layers,
        )
        self.prefixes = Prefixes(self.stores, metrics, settings, fingerprint=model.fingerprint, engine=engine)
        self.uploads = KvUploads(self.stores, runtime.spawn, metrics, max_mib=settings.store_put_mib)
