"""The part of libucp's binary interface that we use: structs, constants, prototypes (ucp/api/ucp.h).

UCX keeps this ABI within major version 1: every struct begins with a mask of its valid fields and only grows
at its end. Offsets were compared with the headers of 1.13 and 1.22.
"""

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

API_VERSION = (1, 13)

OK = 0
INPROGRESS = 1
ERR_BUSY = -15
ERR_LAST = -100
"""Pointers above 2**64 + ERR_LAST are error codes, as in Linux's ERR_PTR."""

FEATURE_WAKEUP = 1 << 4
FEATURE_AM = 1 << 6
PARAM_FEATURES = 1 << 0
WORKER_PARAM_THREAD_MODE = 1 << 0
THREAD_MODE_SINGLE = 0
WORKER_ATTR_ADDRESS = 1 << 1
WORKER_ATTR_MAX_AM_HEADER = 1 << 3
EP_PARAM_REMOTE_ADDRESS = 1 << 0
EP_PARAM_ERR_HANDLING_MODE = 1 << 1
EP_PARAM_ERR_HANDLER = 1 << 2
ERR_HANDLING_MODE_PEER = 1
OP_CALLBACK = 1 << 1
OP_USER_DATA = 1 << 2
OP_FLAGS = 1 << 4
AM_FLAG_WHOLE_MSG = 1 << 0
AM_SEND_FLAG_EAGER = 1 << 1
AM_SEND_FLAG_RNDV = 1 << 2
AM_RECV_ATTR_FLAG_RNDV = 1 << 17
AM_HANDLER_ID, AM_HANDLER_FLAGS, AM_HANDLER_CB = 1 << 0, 1 << 1, 1 << 2

SendCallback = CFUNCTYPE(None, c_void_p, c_int8, c_void_p)
"""request, status, user_data; also ends a close."""
FetchCallback = CFUNCTYPE(None, c_void_p, c_int8, c_size_t, c_void_p)
"""request, status, length, user_data."""
MessageCallback = CFUNCTYPE(c_int8, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)
"""arg, header, header_length, data, length, param -> status."""
ErrorCallback = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)
"""arg, endpoint, status."""


class Params(Structure):
    """ucp_params_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
        ("node_local_id", c_size_t),
    )


class WorkerParams(Structure):
    """ucp_worker_params_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_uint64 * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class WorkerAttr(Structure):
    """ucp_worker_attr_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("address_flags", c_uint32),
        ("address", c_void_p),
        ("address_length", c_size_t),
        ("max_am_header", c_size_t),
        ("name", ctypes.c_char * 32),
        ("max_debug_string", c_size_t),
    )


class EndpointParams(Structure):
    """ucp_ep_params_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_handler_cb", c_void_p),
        ("err_handler_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", c_void_p),
        ("sockaddr_length", c_uint32),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", c_void_p),
        ("local_sockaddr_length", c_uint32),
    )


class RequestParam(Structure):
    """ucp_request_param_t."""

    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
        ("remote_datatype", c_uint64),
        ("remote", c_void_p),
        ("remote_count", c_size_t),
    )


class MessageHandlerParam(Structure):
    """ucp_am_handler_param_t."""

    _fields_ = (
        ("field_mask", c_uint64),
        ("id", c_uint),
        ("flags", c_uint32),
        ("cb", c_void_p),
        ("arg", c_void_p),
    )


PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ucp_get_version_string": (c_char_p, ()),
    "ucs_status_string": (c_char_p, (c_int8,)),
    "ucp_config_read": (c_int8, (c_char_p, c_char_p, POINTER(c_void_p))),
    "ucp_config_release": (None, (c_void_p,)),
    "ucp_init_version": (c_int8, (c_uint, c_uint, POINTER(Params), c_void_p, POINTER(c_void_p))),
    "ucp_cleanup": (None, (c_void_p,)),
    "ucp_worker_create": (c_int8, (c_void_p, POINTER(WorkerParams), POINTER(c_void_p))),
    "ucp_worker_destroy": (None, (c_void_p,)),
    "ucp_worker_query": (c_int8, (c_void_p, POINTER(WorkerAttr))),
    "ucp_worker_release_address": (None, (c_void_p, c_void_p)),
    "ucp_worker_get_efd": (c_int8, (c_void_p, POINTER(c_int))),
    "ucp_worker_arm": (c_int8, (c_void_p,)),
    "ucp_worker_progress": (c_uint, (c_void_p,)),
    "ucp_worker_set_am_recv_handler": (c_int8, (c_void_p, POINTER(MessageHandlerParam))),
    "ucp_ep_create": (c_int8, (c_void_p, POINTER(EndpointParams), POINTER(c_void_p))),
    "ucp_ep_close_nbx": (c_void_p, (c_void_p, c_void_p)),
    "ucp_am_send_nbx": (c_void_p, (c_void_p, c_uint, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p)),
    "ucp_am_recv_data_nbx": (c_void_p, (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p)),
    "ucp_am_data_release": (None, (c_void_p, c_void_p)),
    "ucp_request_free": (None, (c_void_p,)),
}
"""Name -> result, arguments."""
