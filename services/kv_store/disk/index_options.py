"""RocksDB's options for small records that must stay small on disk."""

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options

from services.kv_store.disk.settings import DiskSettings


def index_options(settings: DiskSettings) -> Options:
    """No compression: checksums do not compress. All logs are bounded, and none is preallocated at length."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    buffer_bytes = settings.write_buffer_bytes
    options.set_write_buffer_size(buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(2 * buffer_bytes)
    options.set_target_file_size_base(4 * buffer_bytes)
    options.set_max_bytes_for_level_base(4 * buffer_bytes)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(2)
    options.set_manifest_preallocation_size(64 << 10)
    options.set_max_manifest_file_size(256 << 10)
    options.set_max_log_file_size(256 << 10)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(settings.index_cache_bytes))
    table.set_cache_index_and_filter_blocks(True)
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    return options
