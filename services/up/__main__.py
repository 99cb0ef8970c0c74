"""python -m services.up, `kvmesh up`, `make up`."""

import asyncio
import os
import sys

from libs.config.closed_stdout import tolerate_closed_stdout
from libs.config.errors import HelpAsked, SettingsError
from libs.config.load import EXIT_BAD_SETTINGS
from services.up.preflight import NotStartable
from services.up.prepare import prepare
from services.up.start import start


def main() -> int:
    """Returns the exit code: 0 ended as asked, 2 not startable, 130 killed by a second Ctrl-C; ends with 141
    where nobody reads what it says any more."""
    with tolerate_closed_stdout():
        try:
            return asyncio.run(start(prepare(sys.argv[1:], os.environ)))
        except HelpAsked as asked:
            print(asked)
            return 0
        except (SettingsError, NotStartable) as error:
            print(f"up: {error}", file=sys.stderr)
            return EXIT_BAD_SETTINGS


if __name__ == "__main__":
    raise SystemExit(main())
