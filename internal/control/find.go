package control

import (
	"path/filepath"
)

// SocketName is the name of the socket in its folder, and Folder the folder of the system's daemon.
const (
	SocketName = "control.sock"
	Folder     = "/run/ubcache"
	SocketEnv  = "UBCACHE_SOCKET"
)

// Sockets lists where a daemon may have its socket, the first choice first: only given if that is not empty, else
// only $UBCACHE_SOCKET, else one for each of Folders.
func Sockets(given string, getenv func(string) string) []string {
	if given != "" {
		return []string{given}
	}
	if s := getenv(SocketEnv); s != "" {
		return []string{s}
	}
	var list []string
	for _, dir := range Folders(getenv) {
		list = append(list, filepath.Join(dir, SocketName))
	}
	return list
}

// Folders lists the folders that a daemon may keep its files in while it runs: the system's, then the user's.
func Folders(getenv func(string) string) []string {
	list := []string{Folder}
	if dir := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		list = append(list, filepath.Join(dir, "ubcache"))
	}
	return list
}
