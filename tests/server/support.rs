//! A server of one's own, and a client that shows every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::program::program;

/// What takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A server, for as long as it is held.
pub struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Serves the embedded model on a free port.
    pub fn start(args: &[&str]) -> Server {
        let mut command = program();
        command.args(["serve", "--port", "0"]).args(args);
        if !args.contains(&"--device-memory") {
            command.args(["--device-memory", "64MiB"]);
        }
        let spawned = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.expect("the program starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut server = Server { child, address: String::new() };
        let mut said = String::new();
        for line in lines.by_ref() {
            let line = line.expect("it is text");
            if let Some((_, rest)) = line.split_once("http://") {
                server.address = rest.split_whitespace().next().expect("an address").to_owned();
                // What it says later must go somewhere.
                thread::spawn(move || lines.for_each(drop));
                return server;
            }
            said.push_str(&line);
            said.push('\n');
        }
        panic!("the server did not start:\n{said}");
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// A connection to it.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        stream
    }

    /// Sends bytes as they are, and reads the head of what is answered.
    pub fn send(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server that has refused the head of a request may close before the rest is sent.
        let _ = stream.write_all(bytes);
        Reply::read(stream)
    }

    pub fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.request("POST", path, &[], body.to_string().as_bytes())
    }

    pub fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if method == "POST" {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
            if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
                head.push_str("Content-Type: application/json\r\n");
            }
        }
        head.push_str("Connection: close\r\n\r\n");
        self.send(&[head.as_bytes(), body].concat())
    }

    /// Waits until `/load` says what `is_so` wants.
    pub fn wait_for_load(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let load = self.get("/load").json();
            if is_so(&load) {
                return load;
            }
            assert!(start.elapsed() < PATIENCE, "waiting for {what}: {load}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until nothing waits, runs or is parked.
    pub fn wait_until_idle(&self) -> Value {
        self.wait_for_load("an idle server", |load| {
            ["running", "waiting", "swapped", "answers"].iter().all(|name| load[name] == 0)
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer whose head has been read.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    left: Left,
}

/// What is left of a body.
enum Left {
    Bytes(usize),
    Chunks,
    Nothing,
}

impl Reply {
    /// Reads the head of an answer.
    pub fn read(stream: TcpStream) -> Reply {
        let mut reader = BufReader::new(stream);
        let mut status = 100;
        let mut headers = Vec::new();
        // What is before the answer proper, as 100, has no body.
        while status < 200 {
            let line = line(&mut reader);
            status = line.split(' ').nth(1).and_then(|s| s.parse().ok()).expect(&line);
            headers.clear();
            loop {
                let line = self::line(&mut reader);
                let Some((name, value)) = line.split_once(':') else { break };
                headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
        }
        let mut reply = Reply { status, headers, reader, left: Left::Nothing };
        if reply.header("transfer-encoding") == Some("chunked") {
            reply.left = Left::Chunks;
        } else if let Some(length) = reply.header("content-length") {
            reply.left = Left::Bytes(length.parse().expect("a length"));
        }
        reply
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// The next bytes of the body; none at its end.
    pub fn piece(&mut self) -> Option<Vec<u8>> {
        let length = match self.left {
            Left::Nothing => return None,
            Left::Bytes(length) => {
                self.left = Left::Nothing;
                length
            }
            Left::Chunks => {
                let line = line(&mut self.reader);
                usize::from_str_radix(&line, 16).expect("the length of a chunk")
            }
        };
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes).expect("the bytes of the body");
        if matches!(self.left, Left::Chunks) {
            line(&mut self.reader);
            if length == 0 {
                self.left = Left::Nothing;
                return None;
            }
        }
        Some(bytes)
    }

    pub fn bytes(mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece() {
            all.extend(piece);
        }
        all
    }

    pub fn text(self) -> String {
        String::from_utf8(self.bytes()).expect("it is text")
    }

    pub fn json(self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// All events of a stream, each with its name; comments are left out.
    pub fn events(self) -> Vec<(String, Value)> {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let text = self.text();
        assert!(text.ends_with("\n\n"), "the last event is whole");
        let events =
            text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
        events.map(event).collect()
    }
}

/// The name and the data of an event; `[DONE]` comes as a string.
fn event(text: &str) -> (String, Value) {
    let (mut name, mut data) = (String::new(), None);
    for line in text.lines() {
        match line.split_once(": ") {
            Some(("event", value)) => name = value.to_owned(),
            Some(("data", "[DONE]")) => data = Some(Value::from("[DONE]")),
            Some(("data", value)) => data = serde_json::from_str(value).ok(),
            _ => panic!("not a line of an event: {line:?}"),
        }
    }
    (name, data.unwrap_or_else(|| panic!("an event without data: {text:?}")))
}

fn line(reader: &mut impl BufRead) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a line of the answer");
    line.trim_end().to_owned()
}
