package cacheset

import (
	"fmt"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// ReadSuperblock reads the superblock of a device and judges it: what is not allowed to be written is refused.
func ReadSuperblock(io *blockdev.IO) (*ondisk.Superblock, error) {
	info := io.Device().Info()
	if info.Size < ondisk.SuperblockOffset+ondisk.SuperblockBytes {
		return nil, fmt.Errorf("%s: %d bytes, a superblock ends at %d", info.Name, info.Size, ondisk.SuperblockOffset+ondisk.SuperblockBytes)
	}
	b := make([]byte, ondisk.SuperblockBytes)
	if err := io.ReadAt(b, ondisk.SuperblockOffset); err != nil {
		return nil, err
	}
	sb, err := ondisk.DecodeSuperblock(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", info.Name, err)
	}
	if sb.Magic != ondisk.Magic {
		return nil, fmt.Errorf("%s: not formatted: it has no bcache superblock, see \"ubcache format\"", info.Name)
	}
	access, limits := sb.Check(ondisk.Host{DeviceBytes: info.Size, LogicalBlock: info.LogicalBlock})
	if access < ondisk.AccessWrite {
		for _, l := range limits {
			if !l.Warning {
				return nil, fmt.Errorf("%s: superblock: %w", info.Name, l)
			}
		}
	}
	return sb, nil
}

// WriteSuperblock writes a superblock so that it is durable on return, and whole or as before after a power cut: its
// checksum lies in the first sector, which comes last. Fields it brings up to date: the checksum. Source: F 3.7.
//
// flush makes durable what the device has got. A write with FUA is not made: if it fails it may have been told, instead of
// whoever flushes next, that the device has lost other writes.
func WriteSuperblock(io *blockdev.IO, sb *ondisk.Superblock, flush func() error) error {
	sb.SetChecksum()
	b := make([]byte, ondisk.SuperblockBytes)
	sb.Encode(b)
	io = io.WithPurpose(blockdev.ForSuperblock)
	head := io.Device().Info().LogicalBlock
	if head < len(b) {
		// The list of journal buckets goes into the sectors behind. While it changes, the old checksum is wrong;
		// it only does when the set has no contents yet.
		if err := io.WriteAt(b[head:], ondisk.SuperblockOffset+int64(head), 0); err != nil {
			return err
		}
		if err := flush(); err != nil {
			return err
		}
	}
	if err := io.WriteAt(b[:head], ondisk.SuperblockOffset, 0); err != nil {
		return err
	}
	return flush()
}
