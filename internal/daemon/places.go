package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// names are those of all volumes.
func (c *Config) names() []string {
	var list []string
	for _, v := range c.Volumes {
		list = append(list, v.Name)
	}
	return append(list, c.Flash...)
}

// CheckNames says whether volumes can have these names: each once, and none that means something else where
// attributes are asked for, in a URI, or as the name of a file.
func CheckNames(names []string) error {
	for i, n := range names {
		switch {
		case n == "":
			return errors.New("a volume's name is empty")
		case n == "set" || n == "cache":
			return fmt.Errorf("a volume cannot be named %q: under that name are attributes of the set itself", n)
		case n == "." || n == ".." || strings.Contains(n, "/"):
			return fmt.Errorf("a volume cannot be named %q: it is not a name for a file", n)
		case len(n) > 255:
			return fmt.Errorf("a volume's name has %d bytes, at most 255 are possible", len(n))
		case !utf8.ValidString(n) || strings.ContainsFunc(n, unicode.IsControl):
			return fmt.Errorf("a volume cannot be named %q: only printable UTF-8", n)
		case slices.Contains(names[:i], n):
			return fmt.Errorf("two volumes have the name %q", n)
		}
	}
	return nil
}

// runtimeDir returns the folder for what has to outlive the process, "" if there is none.
func (c *Config) runtimeDir() (string, error) {
	if c.RuntimeDir != "" {
		return c.RuntimeDir, useFolder(c.RuntimeDir)
	}
	dir, err := firstFolder(c.folders)
	if err != nil {
		c.Log.Warn("no runtime folder: so that it outlives this process, each acknowledged write waits for the journal; "+
			"--runtime-dir names a folder, best on a tmpfs", "err", err)
	}
	return dir, nil
}

// firstFolder returns the first folder that can be used, or why none can.
func firstFolder(folders []string) (string, error) {
	var reasons []error
	for _, dir := range folders {
		err := useFolder(dir)
		if err == nil {
			return dir, nil
		}
		reasons = append(reasons, err)
	}
	return "", reasonsError(reasons)
}

// reasonsError is errors.Join on one line.
type reasonsError []error

func (r reasonsError) Error() string {
	var s []string
	for _, err := range r {
		s = append(s, err.Error())
	}
	return strings.Join(s, "; ")
}

func (r reasonsError) Unwrap() []error { return r }

// useFolder makes a folder that is missing, with mode 0700, and says why one cannot be used. Whoever could write
// there could put something else in the place of our files.
func useFolder(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s is not a folder", dir)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s has mode %04o: others can write there", dir, info.Mode().Perm())
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("write to %s: %w", dir, err)
	}
	return nil
}
