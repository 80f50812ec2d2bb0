//! COM1, the only way out for words.
//!
//! Lines of several processors are kept apart, but nobody waits for his turn for ever: a
//! trap handler or a panic may print at any moment, also in the middle of a line.

use core::fmt::{self, Write};
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::port::Port;

/// Line state: the transmitter takes another byte.
const ROOM: u8 = 1 << 5;
/// Polls of the line state before a byte is dropped; a real line needs about 100.
const PATIENCE: u32 = 100_000;

/// Looks at the line of another processor before it is interrupted: many times what a long
/// line takes.
const TURNS: u32 = 10_000_000;

/// Some processor is in the middle of a line.
static TAKEN: AtomicBool = AtomicBool::new(false);

struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if byte == b'\n' {
                send(b'\r');
            }
            send(byte);
        }
        Ok(())
    }
}

/// 115200 baud, 8 data bits, no parity, 1 stop bit, queues on, interrupts off.
pub(crate) fn initialise() {
    Port::SERIAL_INTERRUPTS.write8(0);
    Port::SERIAL_FORMAT.write8(0x80);
    Port::SERIAL_DATA.write8(1);
    Port::SERIAL_INTERRUPTS.write8(0);
    Port::SERIAL_FORMAT.write8(3);
    Port::SERIAL_QUEUES.write8(7);
}

/// Print bytes as they are.
pub(crate) fn raw(bytes: &[u8]) {
    take();
    bytes.iter().copied().for_each(send);
    TAKEN.store(false, Ordering::Release);
}

/// Wait for the line of another processor to end.
fn take() {
    for _ in 0..TURNS {
        if !TAKEN.swap(true, Ordering::Acquire) {
            break;
        }
        spin_loop();
    }
}

/// Print one line; use [`say!`](crate::say).
pub(crate) fn line(text: fmt::Arguments<'_>) {
    take();
    // `Serial` never fails, and a formatter that does leaves a short line, not a lost verdict.
    if Serial.write_fmt(text).is_err() {
        send(b'?');
    }
    send(b'\r');
    send(b'\n');
    TAKEN.store(false, Ordering::Release);
}

/// Send one byte, or drop it if the line stays busy.
fn send(byte: u8) {
    for _ in 0..PATIENCE {
        if Port::SERIAL_STATE.read8() & ROOM != 0 {
            break;
        }
    }
    Port::SERIAL_DATA.write8(byte);
}

/// Print one formatted line on COM1.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::serial::line(format_args!($($text)*))
    };
}
