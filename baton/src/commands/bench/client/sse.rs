//! Server-sent events out of a byte stream: the data of each event, whole.
//!
//! Only what completion servers send is read: `data` fields. Other fields and
//! comments are skipped, as the standard (HTML, section 9.2) asks.

/// Longest event that is collected; a server that sends more is cut off.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Collects bytes until events are whole.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_return: bool,
}

/// An event over the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server-sent event is longer than {EVENT_BYTES_MAX} bytes")]
pub struct TooLong;

impl Events {
    /// Takes the next bytes and calls `on_data` for each event they complete.
    ///
    /// # Errors
    /// [`TooLong`]; the stream cannot be read further then.
    pub fn push(&mut self, bytes: &[u8], on_data: &mut dyn FnMut(&[u8])) -> Result<(), TooLong> {
        for byte in bytes {
            // Lines end with CR, LF or both.
            let second_of_pair = std::mem::take(&mut self.after_return) && *byte == b'\n';
            match byte {
                _ if second_of_pair => {}
                b'\n' | b'\r' => {
                    self.after_return = *byte == b'\r';
                    self.end_line(on_data);
                }
                _ if self.line.len() + self.data.len() >= EVENT_BYTES_MAX => return Err(TooLong),
                byte => self.line.push(*byte),
            }
        }
        Ok(())
    }

    fn end_line(&mut self, on_data: &mut dyn FnMut(&[u8])) {
        if self.line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                on_data(&self.data);
                self.data.clear();
            }
            return;
        }
        if let Some(value) = self.line.strip_prefix(b"data:") {
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push(b'\n');
            }
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> Vec<String> {
        let mut events = Events::default();
        let mut found = Vec::new();
        for piece in pieces {
            events
                .push(piece.as_bytes(), &mut |data| {
                    found.push(String::from_utf8_lossy(data).into_owned());
                })
                .unwrap();
        }
        found
    }

    #[test]
    fn events_are_found_however_the_bytes_are_cut() {
        let text = "data: {\"a\":1}\n\n: ping\n\nevent: x\ndata:two\ndata: lines\r\n\r\nid: 7\n\ndata: [DONE]\n\n";
        let whole = read(&[text]);
        assert_eq!(whole, ["{\"a\":1}", "two\nlines", "[DONE]"]);
        for at in 0..text.len() {
            let (left, right) = text.split_at(at);
            assert_eq!(read(&[left, right]), whole, "cut at {at}");
        }
    }

    #[test]
    fn an_unfinished_event_is_not_given_out() {
        assert_eq!(read(&["data: x\n"]), [""; 0]);
        assert_eq!(read(&["data:\n\n"]), [""]);
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut events = Events::default();
        let piece = vec![b'x'; EVENT_BYTES_MAX];
        assert_eq!(events.push(&piece, &mut |_| {}), Ok(()));
        assert_eq!(events.push(b"x", &mut |_| {}), Err(TooLong));
    }
}
