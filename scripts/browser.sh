#!/bin/sh
# A headless Chromium for the tests of reports: the one that is there, Debian's, or playwright's own.
# Usage: scripts/browser.sh PYTHON
set -eu
python=${1:-python3}

"$python" -m pip install --quiet -c "$(dirname "$0")/../constraints.txt" playwright

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then
        echo "browser: $(command -v "$name")"
        exit 0
    fi
done

if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get install --yes --quiet --no-install-recommends chromium >/dev/null && exit 0
fi
"$python" -m playwright install chromium || {
    echo "No Chromium could be installed; the tests will say that they are skipped." >&2
    echo "Install one (Debian: apt-get install chromium) or set GPATTENTION_BROWSER to its path." >&2
}
