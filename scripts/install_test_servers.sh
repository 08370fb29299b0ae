#!/bin/sh
# Installs what the tests start beside Quire: redis-server, Prometheus, a browser, the shells zsh and
# fish, and the library that Mooncake's client needs. Nothing is left running. Where it cannot be installed it says so, and those tests are skipped.
set -u
PATH="$PATH:/usr/sbin:/sbin"

missing=""
command -v redis-server >/dev/null || missing="$missing redis-server"
command -v prometheus >/dev/null || missing="$missing prometheus"
command -v chromium >/dev/null || missing="$missing chromium"
command -v zsh >/dev/null || missing="$missing zsh"
command -v fish >/dev/null || missing="$missing fish"
ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 || missing="$missing libibverbs1"
[ -n "$missing" ] || exit 0

skip() {
    echo "Not installed:$missing ($1). Tests that need it will be skipped; to have them, $2."
    exit 0
}

command -v apt-get >/dev/null || skip "there is no apt-get here" "install it with your system's packages"
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    skip "this needs root" "run: sudo apt-get install$missing"
fi

# Debian's packages start their servers as they are installed, unless this policy forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod +x "$policy"
    trap '$as_root rm -f "$policy"' EXIT
fi

install() {
    # shellcheck disable=SC2086  # the names are separate words
    $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

install || { $as_root apt-get update -qq >/dev/null && install; } ||
    skip "apt-get failed" "run: sudo apt-get install$missing"
echo "Installed for the tests:$missing."
