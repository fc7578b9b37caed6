package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/control"
	"github.com/ubcache/ubcache/internal/nbd"
)

// A Config says what Serve serves. The order is that of the exports: volumes, then flash-only ones.
type Config struct {
	Cache   string   // path
	Volumes []Named  // backing devices
	Flash   []string // labels or slot numbers; also the names of the volumes
	Listen  []string // addresses as nbd.Listen takes them

	// Socket is the path of the control socket. Default: $UBCACHE_SOCKET, else control.sock in the first of
	// control.Folders that can be used; if none can, there is no socket, and a warning.
	Socket string

	// RuntimeDir is the folder for what has to outlive this process, but not the machine. Default: the first of
	// control.Folders that can be used; if none can, each acknowledged write waits for the journal, and a warning
	// says so.
	RuntimeDir string

	NodeCache int64  // bytes of btree nodes kept in memory; 0: the engine's default
	Engine    string // of blockdev.Options
	Version   string // of the program, for the status

	Log *slog.Logger // default: none

	// Ready, if set, hears once that all is served, and where.
	Ready func(Served)

	// Wrap, if set, may put something between a device and the engine: role is "cache" or "backing", name that of
	// the volume. What it returns is closed in the device's place.
	Wrap func(role, name string, dev blockdev.Device) blockdev.Device

	// For tests, each with its default: the engine, the environment, the folders, and limits.
	open       func(ctx context.Context, o ubcache.Options) (cacheSet, error)
	getenv     func(string) string
	folders    []string
	drainLimit time.Duration // for requests in flight
	closeLimit time.Duration // for the set
	closeGrace time.Duration // for its last steps after that
}

// Limits of an orderly end, besides shutdownLimit. Together they stay below the 90 s after which systemd kills.
const (
	controlLimit = 2 * time.Second  // requests to the control socket
	jobLimit     = time.Second      // jobs, which were cancelled when the end began
	closeLimit   = 60 * time.Second // the set writes out what makes the next start short
	closeGrace   = 15 * time.Second // and then, in any case, the open journal entry
)

func (c *Config) setDefaults() {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.open == nil {
		c.open = openEngine
	}
	if c.getenv == nil {
		c.getenv = os.Getenv
	}
	if c.folders == nil {
		c.folders = control.Folders(c.getenv)
	}
	if c.drainLimit == 0 {
		c.drainLimit = shutdownLimit
	}
	if c.closeLimit == 0 {
		c.closeLimit = closeLimit
	}
	if c.closeGrace == 0 {
		c.closeGrace = closeGrace
	}
}

// A serving is a Serve under way.
type serving struct {
	Config
	down     teardown
	backend  *backend
	controls func() error      // stops the control socket; once
	devices  []blockdev.Device // for Wrap: cache, then those of Volumes; else nil
	set      cacheSet
	nbd      *nbd.Server
	served   Served
}

// Serve runs a cache set and serves its volumes until ctx ends. Then it answers the requests in flight, closes the
// set, and returns nil if that went well. Each of these has its limit of time; nothing that was acknowledged is lost
// where one is reached.
func Serve(ctx context.Context, c Config) (err error) {
	c.setDefaults()
	if err := CheckNames(c.names()); err != nil {
		return err
	}
	s := &serving{Config: c, down: teardown{log: c.Log}, backend: newBackend(&c)}
	defer func() { err = s.down.run(err) }()
	// The control socket first: whoever finds another daemon there has not touched a device yet.
	for _, start := range []func(context.Context) error{s.startControl, s.openDevices, s.openSet, s.openVolumes, s.listen} {
		if err := start(ctx); err != nil {
			return err
		}
	}
	s.logStart()
	s.backend.start(s.set, s.nbd, s.served.Addrs)
	if c.Ready != nil {
		c.Ready(s.served)
	}
	<-ctx.Done()
	s.backend.stop()
	return nil
}

// startControl makes the control socket. Until the end of the start it answers that the daemon is starting.
func (s *serving) startControl(context.Context) error {
	s.controls = func() error { return nil }
	path := s.Socket
	if path == "" {
		path = s.getenv(control.SocketEnv)
	}
	if path == "" {
		dir, err := firstFolder(s.folders)
		if err != nil {
			s.Log.Warn("no control socket: status, get, set, flush, detach and flash will not reach this daemon; --socket names another place", "err", err)
			return nil
		}
		path = filepath.Join(dir, control.SocketName)
	}
	l, err := control.Listen(path)
	if err != nil {
		return err
	}
	server := control.NewServer(s.backend, s.Log)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	s.controls = sync.OnceValue(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), controlLimit)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			s.Log.Warn("requests to the control socket were cut off", "limit", controlLimit)
		}
		return <-ended
	})
	s.down.add(s.controls)
	s.served.Socket = path
	return nil
}

// openDevices opens what Wrap wants to see. They are closed after the set.
func (s *serving) openDevices(context.Context) error {
	if s.Wrap == nil {
		return nil
	}
	s.devices = make([]blockdev.Device, 0, 1+len(s.Volumes))
	open := func(role, name, path string) error {
		dev, err := blockdev.Open(path, blockdev.Options{Engine: s.Engine, Logger: s.Log})
		if err != nil {
			return err
		}
		dev = s.Wrap(role, name, dev)
		s.down.add(dev.Close)
		s.devices = append(s.devices, dev)
		return nil
	}
	if err := open("cache", "cache", s.Cache); err != nil {
		return err
	}
	for _, v := range s.Volumes {
		if err := open("backing", v.Name, v.Device); err != nil {
			return err
		}
	}
	return nil
}

// backing returns what the engine is told of the volumes that have a backing device.
func (s *serving) backing() (list []ubcache.VolumeOptions) {
	for i, n := range s.Volumes {
		o := ubcache.VolumeOptions{Name: n.Name, Backing: n.Device}
		if s.devices != nil {
			o.Backing, o.BackingDevice = "", s.devices[1+i]
		}
		list = append(list, o)
	}
	return list
}

// openSet opens the set, by path or on the device opened before.
func (s *serving) openSet(ctx context.Context) error {
	dir, err := s.runtimeDir()
	if err != nil {
		return err
	}
	o := ubcache.Options{Cache: s.Cache, RuntimeDir: dir, NodeCache: s.NodeCache, Engine: s.Engine, Logger: s.Log, Volumes: s.backing()}
	if s.devices != nil {
		o.Cache, o.CacheDevice = "", s.devices[0]
	}
	set, err := s.open(ctx, o)
	if err != nil {
		return err
	}
	s.set = set
	s.down.add(func() error { return s.closeSet(set) })
	return nil
}

// logStart says what the start found: what it has recovered, and what of the set it was not given.
func (s *serving) logStart() {
	st := s.set.Stats()
	s.Log.Info("the set is open", "set", st.UUID, "replayed keys", st.ReplayedKeys, "mapped entries", st.MappedEntries,
		"volumes", len(s.served.Volumes), "dirty bytes", st.DirtyBytes)
	for _, a := range s.set.AbsentVolumes() {
		s.Log.Warn("a volume with dirty data is left out: its backing device was not given, and is not complete without the cache",
			"label", a.Label, "uuid", a.UUID, "slot", a.Slot, "dirty bytes", a.Dirty)
	}
}

// closeSet closes the set, and says what it leaves dirty.
func (s *serving) closeSet(set cacheSet) error {
	dirty := set.Stats().DirtyBytes
	err := closeSet(set, s.closeLimit, s.closeGrace, s.Log)
	if err == nil {
		s.Log.Info("the set is closed", "dirty bytes", dirty)
	}
	return err
}

// openVolumes opens the volumes and makes them exports.
func (s *serving) openVolumes(ctx context.Context) error {
	s.down.add(func() error {
		s.backend.jobs.wait(jobLimit)
		return nil
	})
	s.down.add(s.controls) // before the set is closed: from then on it cannot be asked
	s.nbd = nbd.NewServer(nbd.Options{Log: s.Log})
	s.down.add(func() error { return drain(s.nbd, s.drainLimit, s.Log) })
	add := func(o ubcache.VolumeOptions) error {
		v, err := s.set.OpenVolume(ctx, o)
		if err != nil {
			return err
		}
		if err := s.nbd.AddExport(o.Name, newVolumeExport(v, o.Flash != "")); err != nil {
			return fmt.Errorf("export %q: %w", o.Name, err)
		}
		s.backend.add(o.Name, v)
		s.served.Volumes = append(s.served.Volumes, ServedVolume{Name: o.Name, Size: v.Size()})
		return nil
	}
	for _, o := range s.backing() {
		if err := add(o); err != nil {
			return err
		}
	}
	for _, name := range s.Flash {
		if err := add(ubcache.VolumeOptions{Name: name, Flash: name}); err != nil {
			return err
		}
	}
	return nil
}

func (s *serving) listen(ctx context.Context) (err error) {
	s.served.Addrs, err = listen(ctx, s.nbd, s.Listen, s.down.add)
	return err
}
