package daemon

import (
	"context"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
)

// A cacheSet is what the daemon needs of a *ubcache.CacheSet, and a volume what it needs of a *ubcache.Volume.
type cacheSet interface {
	OpenVolume(ctx context.Context, o ubcache.VolumeOptions) (volume, error)
	Close(ctx context.Context) error
	Stats() ubcache.SetStats
	GC() ubcache.GCStats
	Stalls() []ubcache.Stall
	Objects() []string
	Attributes(object string) ([]ubcache.Attribute, error)
	Attribute(object, name string) (string, error)
	SetAttribute(ctx context.Context, object, name, value string) error
	CloseVolume(ctx context.Context, name string) error
	AbsentVolumes() []ubcache.AbsentVolume
	FlashVolumes() []ubcache.FlashVolume
	CreateFlash(ctx context.Context, label string, size int64) (slot int, err error)
	GrowFlash(ctx context.Context, name string, size int64) error
	DeleteFlash(ctx context.Context, name string) error
}

type volume interface {
	Size() int64
	BlockSize() int
	Stats() ubcache.VolumeStats
	Device() blockdev.Device
	WriteBack(ctx context.Context) error
	Detach(ctx context.Context) error
	EachState(ctx context.Context, off, n int64, fn func(s ubcache.BlockState, off, n int64) bool) error
}

// openEngine is ubcache.Open.
func openEngine(ctx context.Context, o ubcache.Options) (cacheSet, error) {
	s, err := ubcache.Open(ctx, o)
	if err != nil {
		return nil, err
	}
	return engine{s}, nil
}

type engine struct{ *ubcache.CacheSet }

func (e engine) OpenVolume(ctx context.Context, o ubcache.VolumeOptions) (volume, error) {
	v, err := e.CacheSet.OpenVolume(ctx, o)
	if err != nil {
		return nil, err
	}
	return v, nil
}
